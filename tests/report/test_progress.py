import io
import re
import time

import pytest
from rich.console import Console

import stepcache as sc
from stepcache.events import BuildFailed, Built, Loaded, Miss, StageStarted
from stepcache.report.progress import BuildProgress

BUILT = Built("step", 1, Miss("step", 1, "first call"), 1.0, 1.0, 1.0, 0.0)


@pytest.fixture
def screen():
    """A terminal; `screen.file` has what was written to it."""
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_long_build_is_one_log_line(caplog):
    shown = BuildProgress(after_seconds=0.01, log_after_seconds=0.3)
    shown(StageStarted("slow_step", 1, "trace"))
    wait_for(lambda: caplog.records)
    (seconds,) = re.findall(r"after (\S+) s", caplog.text)
    assert float(seconds) >= 0.3
    shown(StageStarted("slow_step", 1, "compile"))
    shown(BUILT)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        caplog.records[0].getMessage()
    ]
    assert "building slow_step takes long: still in trace after" in caplog.text


def test_a_long_build_is_a_line_on_a_terminal(screen):
    shown = BuildProgress(0.01, screen)
    shown(StageStarted("slow_step", 1, "trace"))
    wait_for(lambda: "slow_step: trace" in screen.file.getvalue())
    shown(StageStarted("slow_step", 1, "compile"))
    wait_for(lambda: "slow_step: compile" in screen.file.getvalue())
    shown(BUILT)
    assert not shown._running


@pytest.mark.parametrize("end", [BUILT, BuildFailed("step", 1, "trace", "ValueError")])
def test_a_short_build_is_silent(end, screen, caplog):
    shown = BuildProgress(0.05, screen)
    shown(StageStarted("step", 1, "trace"))
    shown(end)
    time.sleep(0.15)
    assert not screen.file.getvalue() and not shown._running
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_every_build_is_logged_with_its_reason(caplog):
    caplog.set_level("INFO", logger="stepcache")

    @sc.step
    def told(x):
        return x

    told(1)
    told(1.0)
    assert "told, miss 1" in caplog.text and "int32[]" in caplog.text


def test_what_was_not_compiled_is_no_news(caplog):
    caplog.set_level("INFO", logger="stepcache")
    BuildProgress()(Loaded("step", 1, Miss("step", 1, "evicted"), "disk", {}, 0.0))
    assert not caplog.records
