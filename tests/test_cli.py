"""The command line: what it finds, what it says of trouble, and what it leaves alone."""

import dataclasses
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

import stepcache as sc
from stepcache.cli import main
from stepcache.cli.directories import DURATION, SIZE
from stepcache.report import doctor
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.run_log import Row, RunLog

LOOKING = ("ls", "why", "verify")


@sc.step
def grow(x):
    return x + 1


@sc.step(static_argnames=("by",))
def shrink(x, by=2):
    return x / by


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A directory with two steps, one of which has two signatures."""
    directory = tmp_path_factory.mktemp("cli") / "programs"
    cache = sc.ProgramCache(directory)
    with sc.Session(cache=cache):
        grow(jnp.ones(8))
        grow(jnp.ones(16))
        shrink(jnp.ones(8))
    cache.flush()
    return directory


@pytest.fixture
def directory(built, tmp_path):
    """A copy of it, to spoil."""
    return Path(shutil.copytree(built, tmp_path / "programs"))


def run(*arguments, code=0, answer=None):
    result = CliRunner().invoke(main, [str(each) for each in arguments], input=answer)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def run_json(*arguments, code=0):
    result = CliRunner().invoke(main, [*(str(each) for each in arguments), "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def entry_files(directory, kind):
    return sorted((directory / "v2" / "entries" / kind).iterdir())


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# ---- nothing there ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [*([name] for name in LOOKING), ["prune", "--max-bytes", "1GB"], ["clear", "--yes"]]
)
def test_a_missing_directory_is_an_empty_cache(tmp_path, command):
    missing = tmp_path / "missing"
    run("cache", *command, "--dir", missing)
    assert isinstance(run_json("cache", *command, "--dir", missing), dict)
    assert not missing.exists()


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("hello")
    assert "holds no programs" in run("cache", "ls", "--dir", tmp_path).stdout
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_off_is_said(monkeypatch):
    monkeypatch.setenv("STEPCACHE_DIR", "off")
    assert "STEPCACHE_DIR=off" in run("cache", "ls", code=2).output


def test_the_default_directory_is_that_of_the_cache(built, monkeypatch):
    monkeypatch.setenv("STEPCACHE_DIR", str(built))
    assert run_json("cache", "ls")["directory"] == str(built)


@pytest.mark.parametrize("command", [("cache", "ls"), ("cache", "verify"), ("doctor",)])
def test_a_url_is_refused_and_makes_no_directory(command, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    refused = run(*command, "--dir", "gs://bucket/programs", code=1)
    assert "and not a URL" in refused.output and "--dir" in refused.output
    monkeypatch.setenv("STEPCACHE_DIR", "s3://bucket/programs")
    refused = run(*command, code=1)
    assert "s3://bucket/programs" in refused.output and "STEPCACHE_DIR" in refused.output
    assert not list(empty.iterdir())


def test_a_directory_that_others_can_write_is_refused(directory):
    directory.chmod(0o777)
    assert "chmod 700" in run("cache", "ls", "--dir", directory, code=1).output
    assert "Others can write" in run_json("cache", "ls", "--dir", directory, code=1)["error"]


def test_a_file_is_no_directory(tmp_path, monkeypatch):
    place = tmp_path / "file"
    place.touch()
    monkeypatch.setenv("STEPCACHE_DIR", str(place))
    assert "not a directory" in run("cache", "ls", code=1).output
    assert f"not a directory ({place}" in run("doctor", "--no-round-trip", code=1).output


def test_a_path_that_the_system_refuses(tmp_path):
    assert "too long" in run("cache", "ls", "--dir", tmp_path / ("a" * 300), code=1).stderr


# ---- ls and show --------------------------------------------------------------------------------


def test_ls(built):
    found = run_json("cache", "ls", "--dir", built)
    assert (found["programs"], found["predictions"], found["damaged"]) == (3, 1, 0)
    labels = [item["label"].rpartition(":")[2] for item in found["items"]]
    assert sorted(labels) == ["grow", "grow", "shrink"]
    for item in found["items"]:
        assert item["kind"] == "program" and item["build_seconds"] > 0
        assert abs(item["built_time"] - time.time()) < 600
    assert found["size_bytes"] > sum(item["size_bytes"] for item in found["items"]) > 0
    text = run("cache", "ls", "--dir", built).stdout
    assert "test_cli.py:shrink" in text and "3 programs of 1 script, " in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert len(text.splitlines()) == 5, "one line a row"


@pytest.mark.parametrize("sort", ["used", "built", "size", "seconds", "label"])
def test_ls_sorts(built, sort):
    items = run_json("cache", "ls", "--dir", built, "--sort", sort)["items"]
    keys = {"used": "used_time", "built": "built_time", "size": "size_bytes"}
    values = [
        item[keys.get(sort, {"seconds": "build_seconds"}.get(sort, "label"))] for item in items
    ]
    assert values == sorted(values, reverse=sort != "label")


def test_show(built):
    program = entry_files(built, "program")[0].name
    found = run_json("cache", "show", program[:10], "--dir", built)
    assert (found["kind"], found["digest"], found["module"]) == ("program", program, "")
    assert {"trace", "lower", "compile"} <= found["seconds"].keys()
    text = run("cache", "show", program[:10], "--dir", built).stdout
    assert found["label"] in text and "compile" in text and "stablehlo" not in text
    text = run("cache", "show", program[:10], "--module", "--dir", built).stdout
    assert "stablehlo." in text and "test_cli.py" in text, "with locations"


def test_show_of_what_a_program_has_captured(tmp_path):
    about = {"label": "model.py:f", "seconds": {}, "captured": [["table", "float32[8]", 32]]}
    DiskStore(tmp_path).publish("program", "ab" * 32, about, b"")
    assert "table, float32[8], 32 B" in run("cache", "show", "f", "--dir", tmp_path).stdout
    found = run_json("cache", "show", "f", "--dir", tmp_path)
    assert found["captured"] == [{"name": "table", "type": "float32[8]", "size_bytes": 32}]


def test_show_of_a_prediction(built):
    (prediction,) = entry_files(built, "prediction")
    assert "programs: 3" in run("cache", "show", prediction.name, "--dir", built).stdout


def test_show_by_name(built):
    assert run_json("cache", "show", "shrink", "--dir", built)["label"].endswith(":shrink")
    assert "may be any of" in run("cache", "show", "grow", "--dir", built, code=1).stderr
    assert len(run_json("cache", "show", "grow", "--dir", built, code=1)["matches"]) == 2


def test_show_of_what_is_not_there(built, tmp_path):
    assert "fff0fff0" in run("cache", "show", "fff0fff0", "--dir", built, code=1).stderr
    assert "error" in run_json("cache", "show", "fff0fff0", "--dir", tmp_path, code=1)


def test_looking_is_not_using(directory):
    files = [*entry_files(directory, "prediction"), *entry_files(directory, "program")]
    flip(files[0], -1)
    for path in files:
        os.utime(path, (1_000_000, 1_000_000))
    run("cache", "ls", "--dir", directory)
    run("cache", "show", files[0].name, "--dir", directory)
    shared = f"file://{directory.parent}/shared"
    run("cache", "push", "--dir", directory, "--remote", shared)
    assert [path.stat().st_mtime for path in files] == [1_000_000] * len(files)


# ---- damage -------------------------------------------------------------------------------------


def test_a_damaged_entry_is_shown(directory):
    (prediction,), program = (
        entry_files(directory, "prediction"),
        entry_files(directory, "program")[0],
    )
    flip(prediction, 40)
    flip(program, 40)
    found = run_json("cache", "ls", "--dir", directory)
    assert found["damaged"] == 2
    problems = {item["digest"]: item["problem"] for item in found["items"]}
    assert problems[prediction.name] and problems[program.name]
    text = run("cache", "ls", "--dir", directory).stdout
    assert f"program {program.name[:12]} is damaged: its header is damaged" in text
    assert "damaged:" in run("cache", "show", program.name, "--dir", directory).stdout


def test_verify_finds_damage_and_puts_it_away(directory):
    program = entry_files(directory, "program")[0]
    flip(program, -1)
    found = run_json("cache", "verify", "--dir", directory, code=1)
    (damaged,) = found["findings"]
    assert found["entries"] == 4 and damaged["digest"] == program.name
    assert "checksum" in damaged["problem"] and not program.exists()
    assert len(list((directory / "v2" / "quarantine").iterdir())) == 1
    assert "none is damaged" in run("cache", "verify", "--dir", directory).stdout


# ---- moving -------------------------------------------------------------------------------------


def test_programs_travel_in_a_directory(directory, tmp_path):
    shared, other = f"file://{tmp_path}/shared", tmp_path / "other"
    assert (
        "1 program pushed to"
        in run("cache", "push", "shrink", "--dir", directory, "--remote", shared).stdout
    )
    assert (
        "2 programs pushed to"
        in run("cache", "push", "--dir", directory, "--remote", shared).stdout
    )
    listed = run_json("cache", "ls", "--remote", shared)
    assert (listed["programs"], listed["predictions"]) == (3, 1)
    assert all(":" in item["label"] for item in listed["items"])
    pull = ("cache", "pull", "--dir", other, "--remote", shared)
    assert "No program matches 'third'" in run(*pull, "third", code=1).stderr
    assert "2 programs pulled from" in run(*pull, "grow").stdout
    assert (
        "1 program pulled from" in run(*pull).stdout and "(3 more were there)" in run(*pull).stdout
    )
    found = run_json("cache", "ls", "--dir", other)
    assert (found["programs"], found["predictions"]) == (3, 1)
    assert run_json("cache", "verify", "--dir", other)["findings"] == []
    removed = run_json("cache", "prune", "--remote", shared, "--max-bytes", "1")
    assert len(removed["removed"]) == 4 and removed["left_bytes"] == 0


def test_what_is_forged_is_not_pulled(directory, tmp_path):
    shared, other = f"file://{tmp_path}/shared", tmp_path / "other"
    run("cache", "push", "--dir", directory, "--remote", shared)
    program = entry_files(directory, "program")[0].name
    flip(tmp_path / "shared" / "stepcache-2" / "program" / program, -1)
    text = run("cache", "pull", "--dir", other, "--remote", shared).stdout
    assert "2 programs pulled" in text and f"program {program[:12]} is refused" in text


@pytest.mark.parametrize(("old", "new"), [("export", "push"), ("import", "pull")])
def test_bundles_are_gone(old, new):
    said = run("cache", old, "programs.bundle", "train", "--trust", code=2).stderr
    assert f"stepcache cache {new} --remote file:///" in said


# ---- why ----------------------------------------------------------------------------------------

MODEL = "model.py:train_step"


def row(event="compiled", at=1_000.0, **details):
    fields = {"seconds": {"trace": 1.0, "compile": 2.0}, **details}
    return Row(event, at, "train.py", "train_step", MODEL, **fields)


def write_runs(directory, *runs):
    """Writes the rows of each run, the earliest first."""
    DiskStore(directory)
    for number, rows in enumerate(runs):
        history = RunLog(directory / "v2" / "runs", clock=lambda n=number: 1_000_000.0 + n)
        for each in rows:
            history.add(each)


def test_why_after_a_real_run(built):
    found = run_json("cache", "why", "--dir", built)["runs"][0]
    assert [each["event"] for each in found["happenings"]] == ["compiled"] * 3
    assert {"trace", "lower", "compile"} <= found["ranks"][0]["seconds"].keys()
    assert all("import" not in each["seconds"] for each in found["happenings"])
    text = run("cache", "why", "shrink", "--dir", built).stdout
    assert "shrink" in text and "grow" not in text


def test_why_tells_what_changed_and_what_is_in_the_way(tmp_path):
    headline = "since the run of Tuesday 2026-11-17 10:02 these have changed:"
    changes = [
        ["code", "model.py:31 in layer", "multiply by 2.0", "multiply by 3.0"],
        ["package", "package jaxlib", "0.10.1", "0.10.2"],
        ["environment", "device kind", "A100", "H100"],
    ]
    details = {"reason": headline, "changes": changes, "not_stored": "it has a callback"}
    write_runs(tmp_path, [row(seconds={"trace": 0.5})], [row(**details)])
    text = run("cache", "why", "--dir", tmp_path).stdout
    assert "since the run of Tuesday 2026-11-17 10:02 these have changed:\n" in text
    assert "model.py:31 in layer: multiply by 2.0 → multiply by 3.0" in text
    assert "package jaxlib: 0.10.1 → 0.10.2" in text
    assert "environment device kind: A100 → H100" in text
    assert "each run has to compile it: it has a callback" in text
    assert "trace 1.00, compile 2.00" in text
    (found,) = run_json("cache", "why", "train_step", "--dir", tmp_path)["runs"][0]["happenings"]
    assert found["changes"][1]["after"] == "0.10.2" and found["not_stored"] == "it has a callback"


@pytest.mark.parametrize(
    ("source", "said"),
    [("preloaded", "preloaded"), ("disk", "from disk"), ("remote", "shared cache"), ("", "loaded")],
)
def test_why_tells_where_a_program_came_from(tmp_path, source, said):
    write_runs(tmp_path, [row("loaded", source=source)])
    assert said in run("cache", "why", "--dir", tmp_path).stdout


@pytest.mark.parametrize("name", ["run.pdf", "run.htm.gz", "run.prm"])
def test_a_report_to_a_suffix_of_no_format_is_refused(tmp_path, name):
    write_runs(tmp_path, [row()])
    out = tmp_path / name
    shown = run("report", "--out", out, "--dir", tmp_path, code=2).stderr
    assert "give --format" in shown and ".html" in shown
    assert not out.exists()
    run("report", "--out", out, "--format", "html", "--dir", tmp_path)
    assert out.read_text().startswith("<!")


@pytest.mark.parametrize("every", ["15", "0s"])
def test_every_needs_a_duration(tmp_path, every):
    write_runs(tmp_path, [row()])
    out = ("--out", tmp_path / "run.prom", "--dir", tmp_path)
    assert "15s" in run("report", "--every", every, *out, code=2).stderr


def test_why_of_an_unknown_step(tmp_path):
    write_runs(tmp_path, [row()])
    assert MODEL in run("cache", "why", "evaluate", "--dir", tmp_path, code=1).stderr
    assert run_json("cache", "why", "evaluate", "--dir", tmp_path, code=1)["known"] == [MODEL]


def test_runs_side_by_side(tmp_path):
    cold = row(seconds={"import": 1.5, "trace": 4.0, "compile": 8.0})
    warm = row("loaded", seconds={"import": 1.25, "trace": 0.125, "load": 0.5})
    write_runs(tmp_path, [cold], [cold], [warm])
    lines = run("cache", "why", "--runs", 2, "--dir", tmp_path).stdout.splitlines()
    assert lines[0].split() == ["seconds", "latest", "1", "before"]
    cells = {line.split()[0]: line.split()[-2:] for line in lines[1:6]}
    assert cells["compile"] == ["·", "8.00"] and cells["load"] == ["0.50", "·"]
    assert cells["all"] == ["1.88", "13.50"]
    names = [line.split()[0] for line in lines[1:6]]
    assert names == ["import", "trace", "load", "compile", "all"]


def test_ranks_of_the_latest_run(tmp_path):
    def rank(number, load, at=5_000.0):
        seconds = {"trace": 0.5 - number / 10, "load": load}
        return [row("loaded", at, rank=number, processes=3, seconds=seconds)]

    earlier = [rank(number, 9.0, at=1_000.0) for number in range(3)]
    write_runs(tmp_path, *earlier, rank(1, 0.2), rank(0, 0.1), rank(2, 0.7))
    (found,) = run_json("cache", "why", "--ranks", "--dir", tmp_path)["runs"]
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2]
    assert (found["slowest"]["trace"], found["slowest"]["load"]) == (0, 2)
    assert "trace rank 0, load rank 2" in run("cache", "why", "--ranks", "--dir", tmp_path).stdout
    assert "import" in found["ranks"][0]["seconds"]
    both = run_json("cache", "why", "--runs", 5, "--dir", tmp_path)["runs"]
    assert [len(each["ranks"]) for each in both] == [3, 3]
    text = run("cache", "why", "--ranks", "--runs", 5, "--dir", tmp_path).stdout
    assert "trace rank 0, load rank 2" in text and text.count("seconds by stage") == 2


def test_a_torn_run_log_is_read_as_far_as_it_goes(tmp_path):
    write_runs(tmp_path, [row()])
    (path,) = (tmp_path / "v2" / "runs").iterdir()
    path.write_bytes(path.read_bytes() + b'{"event": "bu')
    assert len(run_json("cache", "why", "--dir", tmp_path)["runs"][0]["happenings"]) == 1


# ---- prune and clear ----------------------------------------------------------------------------


def test_prune_to_a_size(directory):
    before = run_json("cache", "ls", "--dir", directory)["size_bytes"]
    found = run_json("cache", "prune", "--max-bytes", "8kB", "--dir", directory)
    assert found["left_bytes"] <= 8_000
    assert found["freed_bytes"] == before - found["left_bytes"]
    assert found["removed"]


def test_prune_by_age(directory):
    old = entry_files(directory, "program")[0]
    os.utime(old, (time.time() - 40 * 86400,) * 2)
    found = run_json("cache", "prune", "--older-than", "30d", "--dir", directory)
    assert [each["digest"] for each in found["removed"]] == [old.name]
    assert (
        "0 entries removed"
        in run("cache", "prune", "--older-than", "30d", "--dir", directory).stdout
    )


@pytest.mark.parametrize(
    "arguments",
    [[], *(["--max-bytes", size] for size in ("many", "-1", "9" * 400)), ["--older-than", "30"]],
)
def test_prune_used_wrongly(built, arguments):
    run("cache", "prune", "--dir", built, *arguments, code=2)


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2_000_000_000), ("1.5 GiB", 3 << 29), ("10k", 10_000), ("7", 7)]
)
def test_sizes(text, size):
    assert SIZE.convert(text, None, None) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("1.5h", 5400), ("2w", 1_209_600)]
)
def test_durations(text, seconds):
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "GB", "1..2GB", "1XB", "1e9"])
def test_no_sizes(text):
    with pytest.raises(click.BadParameter):
        SIZE.convert(text, None, None)


def test_clear_asks(directory):
    result = run("cache", "clear", "--dir", directory, code=1, answer="n\n")
    assert "Remove everything, 4 entries" in result.output
    assert run_json("cache", "ls", "--dir", directory)["programs"] == 3
    assert "4 entries removed" in run("cache", "clear", "--dir", directory, answer="y\n").stdout
    assert run_json("cache", "ls", "--dir", directory)["items"] == []


def test_clear_with_yes(directory):
    found = run_json("cache", "clear", "--yes", "--dir", directory)
    assert len(found["removed"]) == 4 and found["left_bytes"] == 0 and found["freed_bytes"] > 0


def test_clear_removes_what_earlier_versions_have_stored(tmp_path):
    old = tmp_path / "v1" / "entries" / "step"
    old.mkdir(parents=True)
    (old / "ab").write_bytes(b"x")
    assert "holds no programs" in run("cache", "ls", "--dir", tmp_path).stdout and old.exists()
    run("cache", "clear", "--yes", "--dir", tmp_path)
    assert not (tmp_path / "v1").exists()


# ---- doctor -------------------------------------------------------------------------------------


def statuses(found):
    return {check["name"]: check["status"] for check in found["checks"]}


def test_doctor_of_a_healthy_directory(built):
    found = run_json("doctor", "--dir", built, "--no-round-trip", "--max-bytes", "1MB")
    assert found["status"] == "ok" and set(statuses(found).values()) == {"ok"}
    assert {"versions", "storing", "directory", "writing", "space", "key"} <= statuses(found).keys()


def test_doctor_of_a_directory_that_is_not_there(tmp_path):
    found = run_json("doctor", "--dir", tmp_path / "a" / "b", "--no-round-trip")
    assert statuses(found)["directory"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_faults(directory):
    flip(entry_files(directory, "program")[0], 40)
    found = run_json("doctor", "--dir", directory, "--no-round-trip", code=1)
    assert statuses(found)["entries"] == "fault"
    run("cache", "verify", "--dir", directory, code=1)
    found = run_json("doctor", "--dir", directory, "--no-round-trip", "--max-bytes", "1MB")
    assert statuses(found)["quarantine"] == "warning"
    text = run("doctor", "--dir", directory, "--no-round-trip").stdout
    assert "try: look into" in text
    directory.chmod(0o770)
    found = run_json("doctor", "--dir", directory, code=1)
    assert statuses(found)["directory"] == "fault"


@pytest.mark.parametrize("mode", [None, 0o666])
def test_doctor_misses_the_key(directory, mode):
    key = directory / "v2" / "key"
    if mode is None:
        key.unlink()
    else:
        key.chmod(mode)
    found = run_json("doctor", "--dir", directory, code=1)
    assert statuses(found)["key"] == "fault"
    assert key.exists() == (mode is not None), "a look makes none"


def test_doctor_warns_of_little_space(built, monkeypatch):
    usage = shutil.disk_usage(built)
    little = usage._replace(free=1 << 30) if hasattr(usage, "_replace") else usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: little)
    found = run_json("doctor", "--dir", built, "--no-round-trip")
    assert statuses(found)["space"] == "warning"


def test_doctor_blames_a_full_disk_for_a_program_that_was_not_stored(tmp_path, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    monkeypatch.setattr(
        doctor, "_probe", lambda path: {"seconds": 1.0, "compiles": 1, "loads": 0, "why": "-"}
    )
    found = doctor.examine(tmp_path, 1 << 30)
    (trip,) = (check for check in found.checks if check.name == "round trip")
    assert trip.status == "fault" and "space" in trip.hint


@pytest.mark.slow
def test_doctor_goes_round(tmp_path, tmp_path_factory, monkeypatch):
    shared = tmp_path_factory.mktemp("shared")
    (shared / "key").write_text("0123456789abcdef" * 4)
    (shared / "key").chmod(0o600)
    monkeypatch.setenv("STEPCACHE_KEY_FILE", str(shared / "key"))
    monkeypatch.setenv("STEPCACHE_REMOTE", f"file://{shared}/programs")
    found = run_json("doctor", "--dir", tmp_path / "programs")
    (trip,) = (check for check in found["checks"] if check["name"] == "round trip")
    assert trip["status"] == "ok", trip
    assert "built in" in trip["detail"] and "loaded by another process in" in trip["detail"]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert not (shared / "programs").exists(), "nor where others would find it"


# ---- serve --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, missing",
    [
        ("", "--variables DIRECTORY"),
        ("--variables a --hosts 2", "--ray"),
        ("--tasks 2x4", "--directory"),
        ("--directory a", "--tasks"),
        ("--tasks 2x4 --directory a --variables b", "excludes --variables"),
        ("--tasks 2x4 --directory a --hosts 3", "--hosts"),
    ],
)
def test_serve_used_wrongly(options, missing):
    assert missing in run("serve", *options.split(), code=2).stderr


# ---- as a program -------------------------------------------------------------------------------


def test_the_entry_point():
    (found,) = importlib.metadata.entry_points(group="console_scripts", name="stepcache")
    assert found.load() is main


@pytest.mark.slow
def test_in_a_pipe(built):
    command = [sys.executable, "-m", "stepcache", "cache", "ls", "--dir", str(built)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "3 programs of 1 script" in result.stdout and "\x1b" not in result.stdout


def test_without_a_standard_output(built, monkeypatch):
    """As `>&-` and some daemons start a process."""
    monkeypatch.setattr(sys, "stdout", None)
    main(["cache", "ls", "--dir", str(built)], standalone_mode=False)


NAMES = dataclasses.replace(
    row(),
    script=f"{'long' * 40}.py",
    changes=[["value", "cfg:key:y", "1", "2"]],
    not_stored="notes.py:book:page",
)


def test_names_are_shown_as_they_are(tmp_path):
    """In a pipe, a file or a log: whole, to be copied, and without pictures for `:key:`."""
    write_runs(tmp_path, [NAMES])
    (listed,) = run_json("report", "--list", "--dir", tmp_path)["runs"]
    lines = run("report", "--list", "--dir", tmp_path).stdout.splitlines()
    assert len(lines) == 2 and listed["script"] in lines[1] and listed["name"] in lines[1]
    text = run("cache", "why", "--dir", tmp_path).stdout
    assert "cfg:key:y: 1 → 2" in text and "notes.py:book:page" in text


@pytest.mark.slow
@pytest.mark.parametrize("command", [("cache", "why"), ("report",)])
def test_an_output_of_few_letters(tmp_path, command):
    write_runs(tmp_path, [NAMES])
    done = subprocess.run(
        [sys.executable, "-m", "stepcache", *command, "--dir", str(tmp_path)],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert b"1 ? 2" in done.stdout or "1 → 2" in done.stdout.decode()


@pytest.mark.slow
def test_looking_starts_no_backend(directory):
    program = entry_files(directory, "program")[0].name
    commands = [["ls"], ["show", program], ["why"], ["verify"], ["prune", "--max-bytes", "1"]]
    commands += [["clear", "--yes"]]
    code = f"""
from click.testing import CliRunner
from stepcache import jaxcompat
from stepcache.cli import main
for command in {commands!r}:
    result = CliRunner().invoke(main, ["cache", *command, "--dir", {str(directory)!r}])
    assert result.exit_code == 0, result.output
    assert not jaxcompat.backends_are_initialized(), command
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_fields_are_documented():
    """The JSON is that of the records, where a comment explains every field."""
    from stepcache.report import inventory, runs, shared
    from stepcache.storage import run_activity

    records = [inventory.Item, inventory.Inventory, inventory.Details, inventory.Checked, Row]
    records += [runs.Rank, runs.Run, runs.Summary, shared.Shared, shared.Removed]
    records += [run_activity.Activity, run_activity.Series, run_activity.Held]
    records += [doctor.Check, doctor.Diagnosis]
    for record in records:
        source = inspect.getsource(record)
        for field in dataclasses.fields(record):
            explained = rf"^    ({field.name}: .*  # .|# .*\n    {field.name}: )"
            assert re.search(explained, source, re.MULTILINE), (record, field.name)
