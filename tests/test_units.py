import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

import stepcache as sc
from stepcache.errors import warn
from stepcache.report.advice import Advice
from stepcache.units import counted, readable_seconds, shortened


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00031, "310 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (999.4, "999 s"), (1234, "1234 s")],
)
def test_readable_seconds(seconds, text):
    assert readable_seconds(seconds) == text


def test_shortened():
    assert shortened("abc", 3) == ["a", "b", "c"]
    assert shortened("abcd", 2) == ["a", "b", "… and 2 more"]


def test_stats_are_read_as_a_table():
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


def test_a_notebook_shows_the_last_expression_of_a_cell_as_print_does():
    """IPython calls `_repr_pretty_` if the class itself has it."""
    step = sc.step(lambda x: x * 2)
    step(1.0)
    for each in (step.stats(), step.last_miss, step.explain(2), Advice("step", 0.1)):
        printed = []
        vars(type(each))["_repr_pretty_"](each, types.SimpleNamespace(text=printed.append), False)
        assert printed == [str(each)]


def by_a_thread(*args):
    thread = threading.Thread(target=warn, args=args)
    thread.start()
    thread.join()


def by_a_pool(*args):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(warn, *args).result()


@pytest.mark.parametrize("by", [by_a_thread, by_a_pool])
def test_a_warning_points_to_no_line_where_a_thread_runs_no_code_of_the_users(by):
    with pytest.warns(sc.StepCacheWarning, match="a reason") as caught:
        by("a reason", sc.StepCacheWarning)
    assert (caught[0].filename, caught[0].lineno) == ("<stepcache>", 0)
