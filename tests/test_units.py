import pytest

from stepcache.units import counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (2, "more change", "2 more changes"),
        (1, "more change", "1 more change"),
        (1, "leaf", "1 leaf"),
        (3, "leaf", "3 leaves"),
        (2, "damaged entry", "2 damaged entries"),
    ],
)
def test_counted(count, noun, text):
    assert counted(count, noun) == text
