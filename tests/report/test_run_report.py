"""`stepcache report`: the page, the metrics and the trace of a run, and of damaged logs of runs."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import types
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from stepcache.cli import main
from stepcache.events import Moved
from stepcache.storage import run_activity
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.run_activity import ActivityLog, Held, Holder, read_activity
from stepcache.storage.run_log import Row, RunLog
from stepcache.variables.plan import HOST_LINK

FORMATS = ("html", "openmetrics", "perfetto")
NASTY = "<i onclick=\"alert('x')\">&amp;\\\n\x00\ud800</i>"

SCRIPT = """
import os, signal, sys, time
import jax.numpy as jnp, numpy as np
import stepcache as sc

@sc.step
def apply(table, x):
    return (table * x).sum()

def train():
    table = sc.Variables(
        np.ones(1000, np.float32),
        placement=sc.OnHost(), read=sc.Read(cache="device"), name="<table> & \\"more\\"",
    )
    for size in (8, 8, 8, 4):
        for _ in range(2):
            apply(table, jnp.ones((size, 1)))
        table.assign(np.zeros(1000, np.float32))

train()
sc.current_session().cache.flush()
if "kill" in sys.argv:
    time.sleep(1.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(*arguments, code=0):
    result = CliRunner().invoke(main, ["report", *(str(each) for each in arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def real_run(directory, *arguments):
    script = directory / "train <&>.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "STEPCACHE_DIR": str(directory / "programs")}
    command = [sys.executable, str(script), *arguments]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == (-9 if arguments else 0), ended.stderr
    assert "Exception ignored" not in ended.stderr
    return directory / "programs"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The directory of a run that has ended."""
    return real_run(tmp_path_factory.mktemp("report"))


def row(event="compiled", at=1_000.0, **details):
    fields = {"seconds": {"trace": 1.0, "compile": 2.0}, "called_time": at - 3.0, **details}
    return Row(event, at, "train.py", "train_step", "model.py:train_step", **fields)


def write_run(directory, *rows, number=0):
    DiskStore(directory)
    log = RunLog(directory / "v2" / "runs", clock=lambda: 1_000_000.0 + number)
    for each in rows:
        log.add(each)
    (path,) = set((directory / "v2" / "runs").iterdir()) - write_run.known
    write_run.known.add(path)
    return path, directory / "v2" / "activity" / f"{path.stem}.json"


write_run.known = set()


class Page(HTMLParser):
    """A page; raises where its elements are not closed in order."""

    EMPTY = frozenset(("meta", "br"))

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open
        self.text = " ".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


def metrics(text):
    """Samples by name and labels, read by a strict parser."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# ---- a real run ---------------------------------------------------------------------------------


def test_the_page_of_a_run(programs):
    page = Page(run("--dir", programs).stdout)
    for part in (
        "train <&>.py",
        '<table> & "more"',
        "float32[8,1] → float32[4,1]",
        "2 compiled",
        HOST_LINK,
        "ended",
    ):
        assert part in page.text, part
    assert (
        "script" not in page.seen
        and "i" not in page.seen
        and ("class", "columns") in page.attributes
    )
    assert not {name for name, _ in page.attributes} & {"src", "href", "onclick"}


def test_the_counts_of_a_run(programs):
    found = metrics(run("--dir", programs, "--format", "openmetrics").stdout)
    table = (("rank", "0"), ("variable", '<table> & "more"'))
    assert found["stepcache_variable_version", *table] == 4
    read = "stepcache_variable_reads_total", table[0]
    assert found[*read, ("source", "copy"), table[1]] == 4
    assert found[*read, ("source", "master"), table[1]] == 4
    moved = {key: value for key, value in found.items() if key[0] == "stepcache_moved_bytes_total"}
    by_step = {dict(key[1:])["mover"]: value for key, value in moved.items()}
    assert by_step == {"apply": 16_000, '<table> & "more"': 16_000}
    events = [dict(key[1:])["event"] for key in found if key[0] == "stepcache_programs_total"]
    assert events == ["compiled"] and found["stepcache_ended", ("rank", "0")] == 1
    assert any(name == "stepcache_program_size_bytes" for name, *_ in found)


def test_the_trace_of_a_run(programs, tmp_path):
    out = tmp_path / "trace.json"
    run("--dir", programs, "--out", out)
    check_trace(json.loads(out.read_text()))


def check_trace(trace):
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X"}
    slices = {}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
        if event["ph"] == "C":
            assert event["ts"] >= 0 and all(value >= 0 for value in event["args"].values())
    for found in slices.values():  # Slices of one thread are nested, or one after the other.
        open_until = []
        for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 1, event
            open_until.append(event["ts"] + event["dur"])


@pytest.mark.slow
def test_a_run_that_is_killed(tmp_path):
    """All that it had written half a second before is in the report."""
    programs = real_run(tmp_path, "kill")
    page = Page(run("--dir", programs).stdout)
    assert (
        "not ended" in page.text and "2 compiled" in page.text and '<table> & "more"' in page.text
    )
    found = metrics(run("--dir", programs, "--format", "openmetrics").stdout)
    assert found["stepcache_ended", ("rank", "0")] == 0


# ---- which run ----------------------------------------------------------------------------------


def test_runs_have_numbers_and_names(tmp_path):
    for number, event in enumerate(("compiled", "loaded")):
        write_run(tmp_path, row(event), number=number)
    listed = json.loads(run("--list", "--json", "--dir", tmp_path).stdout)["runs"]
    events = [(each["number"], each["events"]) for each in listed]
    assert events == [(0, "1 loaded"), (1, "1 compiled")]
    for wanted, event in (("last", "loaded"), ("1", "compiled"), (listed[1]["name"], "compiled")):
        found = json.loads(run(wanted, "--json", "--dir", tmp_path).stdout)
        assert [each["event"] for each in found["happenings"]] == [event]
    assert "train.py" in run("--list", "--dir", tmp_path).stdout
    assert "--list" in run("2", "--dir", tmp_path, code=1).stderr
    assert "--list" in run("other.py", "--dir", tmp_path, code=1).stderr
    assert "FILE" in run("--every", "1s", "--dir", tmp_path, code=2).stderr
    assert "--out" in run("--list", "--out", tmp_path / "a", "--dir", tmp_path, code=2).stderr


def test_a_file_is_written_again_and_again(tmp_path, monkeypatch):
    """Also where there is no run yet."""
    moments = iter([lambda: write_run(tmp_path, row()), lambda: None, sys.exit])
    clock = types.SimpleNamespace(sleep=lambda seconds: next(moments)())
    monkeypatch.setattr(sys.modules["stepcache.cli.report"], "time", clock)
    out = tmp_path / "run.prom"
    run("--every", "15s", "--out", out, "--dir", tmp_path)
    assert ("stepcache_start_time_seconds",) in metrics(out.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.prom", "v2"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space")

    write_run(tmp_path, row())
    monkeypatch.setattr(Path, "replace", fail)
    assert "no space" in run("--out", tmp_path / "a.html", "--dir", tmp_path, code=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["v2"]


@pytest.mark.parametrize("form", FORMATS)
def test_all_ranks_of_a_pod(tmp_path, form):
    for rank in range(3):
        write_run(tmp_path, row(rank=rank, processes=3), number=rank)
    text = run("--dir", tmp_path, "--format", form).stdout
    if form == "html":
        assert "compiled by ranks 0–2" in Page(text).text
    elif form == "openmetrics":
        ranks = {dict(key[1:]).get("rank") for key in metrics(text)}
        assert ranks == {None, "0", "1", "2"}
    else:
        check_trace(json.loads(text))
        names = [e["args"] for e in json.loads(text)["traceEvents"] if e["ph"] == "M"]
        assert {"name": "rank 2: train.py"} in names


# ---- trouble ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_no_run(tmp_path, form):
    for directory in (tmp_path / "none", tmp_path):
        result = run("--dir", directory, "--format", form, code=1)
        assert "No run has used" in result.stderr and not result.stdout
    assert "No run has used" in run("--list", "--dir", tmp_path).stdout


FOREIGN = [
    b'{"event": "bu',
    b"\xff\x00",
    b"[1]",
    b'{"event": "compiled"}',
    b'{"label": 3}',
]


@pytest.mark.parametrize("form", FORMATS)
def test_foreign_rows_are_passed_over(tmp_path, form):
    good = {"event": "compiled", "time": 5.0, "script": "old.py", "step": "f", "label": "old.py:f"}
    bad = [
        {"seconds": {"trace": "long"}},
        {"seconds": {"trace": float("nan")}},
        {"seconds": {"trace": 10**400}},
        {"changes": [1]},
        {"rank": "0"},
        {"called_time": None},
    ]
    path, activity = write_run(tmp_path, row())
    lines = [*FOREIGN, *(json.dumps(good | each).encode() for each in bad)]
    lines += [json.dumps(good | {"of a later version": 1}).encode()]  # This one is read.
    path.write_bytes(b"\n".join([*lines, b""]))
    activity.parent.mkdir(exist_ok=True)
    for text in (b"", b"{", b"[]", b'{"ended": 1, "moved": [], "held": []}', None):
        if text is not None:
            activity.write_bytes(text)
        shown = run("--dir", tmp_path, "--format", form).stdout
        assert "old.py" in shown and "nan" not in shown.lower().replace("nanos", "")
    assert len(json.loads(run("--dir", tmp_path, "--json").stdout)["happenings"]) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_all_that_users_name_is_escaped(tmp_path, form):
    details = {"reason": NASTY, "changes": [["code", NASTY, NASTY, NASTY]], "advice": [NASTY]}
    details |= {"not_stored": NASTY, "program": NASTY, "source": NASTY}
    nasty = Row("compiled", 1_000.0, NASTY, NASTY, NASTY, seconds={NASTY: 1.0}, **details)
    _, file = write_run(tmp_path, nasty)
    log = ActivityLog(lambda: 990.0)
    holder = NastyHolder()
    log.watch(holder)
    log(Moved(NASTY, ((NASTY, 5),)))
    log.write_to(file)
    log.finish()
    text = run("--dir", tmp_path, "--format", form).stdout
    if form == "html":
        page = Page(text)
        assert "i" not in page.seen and "onclick" not in dict(page.attributes)
        assert text.isprintable() or not re.search("[\x00-\x08\ud800-\udfff]", text)
    elif form == "openmetrics":
        labels = [dict(key[1:]) for key in metrics(text)]
        assert any(each.get("mover", "").startswith("<i onclick=\"alert('x')") for each in labels)
    else:
        check_trace(json.loads(text))


class NastyHolder(Holder):
    def _held(self):
        return Held(NASTY, 1, 2, NASTY, NASTY, 4, 3)


# ---- what a process moves -----------------------------------------------------------------------


def test_any_number_of_transfers_takes_a_bounded_file(tmp_path):
    seconds = itertools.accumulate([1.003] * 3_000, lambda now, factor: now * factor)
    times = iter([0.0, *seconds, 1e9, 1e9])
    log = ActivityLog(lambda: next(times))
    for number in range(2_000):
        log(Moved(f"step {number % 40}", ((HOST_LINK, 10),)))
    found = log.activity()
    assert sum(each.size_bytes for each in found.moved) == 20_000
    assert sum(each.transfers for each in found.moved) == 2_000
    assert sum(count for each in found.moved for _, count, _ in each.buckets) == 2_000
    assert len(found.moved) <= 25 and max(len(each.buckets) for each in found.moved) <= 128
    assert found.moved[-1].mover == "(others)"
    log.write_to(tmp_path / "activity" / "file.json")
    log.finish()
    assert (tmp_path / "activity" / "file.json").stat().st_size < 100_000
    assert read_activity(tmp_path / "activity" / "file.json").moved == found.moved


def test_counts_of_deleted_variables_stay(tmp_path):
    log = ActivityLog()

    class Counted(Holder):
        def __init__(self, number):
            self.number = number
            log.watch(self)

        def _held(self):
            return Held(f"v{self.number}", self.number, 4, "replicated")

        def __del__(self):
            log.gone(self._held())

    for number in range(300):
        Counted(number)
    last = Counted(300)
    found = log.activity()
    assert [each.name for each in found.held] == [f"v{n}" for n in range(45, 301)]
    assert last


def test_the_end_of_python(monkeypatch):
    """What is deleted then finds the globals of modules gone."""
    caught, holder = [], NastyHolder()
    monkeypatch.setattr(sys, "unraisablehook", caught.append)
    for name in ("contextlib", "activity_log"):
        monkeypatch.setattr(run_activity, name, None)
    del holder
    assert not caught


def test_the_file_is_written_while_it_changes(tmp_path):
    log, file = ActivityLog(), tmp_path / "activity" / "run.json"
    log(Moved("early", ((HOST_LINK, 1),)))
    log.write_to(file)
    limit = time.monotonic() + 20
    while read_activity(file) is None and time.monotonic() < limit:
        time.sleep(0.05)
    assert [each.mover for each in read_activity(file).moved] == ["early"]
    while log._is_waiting and time.monotonic() < limit:
        time.sleep(0.05)
    assert not log._is_waiting, "it ends where nothing changes"
    shutil.rmtree(file.parent)
    log(Moved("late", ((HOST_LINK, 1),)))
    log.finish()
    assert not file.exists() and not file.parent.exists()


def test_a_forked_child_counts_for_itself(tmp_path):
    log = ActivityLog()
    log(Moved("parent", ((HOST_LINK, 1),)))
    log._pid -= 1  # As it is in a child.
    log(Moved("child", ((HOST_LINK, 1),)))
    assert [each.mover for each in log.activity().moved] == ["child"]


def test_old_logs_leave_with_what_they_moved(tmp_path):
    files = [write_run(tmp_path, row(), number=number)[0] for number in range(66)]
    left = {path.stem for path in (tmp_path / "v2" / "runs").iterdir()}
    assert len(left) == 64 and files[0].stem not in left


# ---- in a browser -------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
MEASURE = """<!DOCTYPE html><body><iframe style="width: WIDTHpx; height: 900px"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const rows = [...page.querySelectorAll("td")].filter(each => each.offsetHeight > 0).length;
  document.body.innerHTML = `<pre>${root.scrollWidth - root.clientWidth} ${rows}</pre>`;
};
frame.srcdoc = PAGE;
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser(programs, tmp_path, width):
    page = json.dumps(run("--dir", programs).stdout).replace("</", "<\\/")
    file = tmp_path / "measure.html"
    file.write_text(MEASURE.replace("WIDTH", str(width)).replace("PAGE", page))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1600,1000"]
    command += ["--virtual-time-budget=5000", "--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    overflow, cells = map(int, re.search(r"<pre>(-?\d+) (\d+)</pre>", shown).groups())
    assert overflow <= 0 and cells > 20
