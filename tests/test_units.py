import pytest

from stepcache.units import counted, shortened


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


def test_shortened():
    assert shortened("abc", 3) == ["a", "b", "c"]
    assert shortened("abcd", 2) == ["a", "b", "… and 2 more"]


def test_stats_are_read_as_a_table():
    import stepcache as sc

    stats = sc.StepStats(misses=2, traces=1, loads=1, trace_seconds=0.25, moved_bytes=1_500_000)
    assert str(stats).splitlines() == [
        "misses            2",
        "traces            1",
        "compiles          0",
        "loads             1",
        "trace time  0.250 s",
        "moved        1.5 MB",
    ]
    assert "<td style='text-align:left'>0.250 s</td>" in stats._repr_html_()
    assert repr(stats).startswith("StepStats(misses=2, ")
