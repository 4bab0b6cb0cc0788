"""Bundles: whole, vouched for or trusted, for this environment, or refused with nothing stored."""

import dataclasses
import hmac
import importlib.metadata
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import msgpack
import pytest
from click.testing import CliRunner

import stepcache as sc
from stepcache.cli import main
from stepcache.fingerprint.dependencies import digest_dependencies
from stepcache.programs.opening import open_archive
from stepcache.report import bundle as bundles
from stepcache.report import moving
from stepcache.report.moving import foreign_parts, settings_that_differ
from stepcache.storage import entry as entries
from stepcache.storage.dependency_record import pack_records, unpack_records
from stepcache.storage.disk_store import DiskStore


@sc.step
def grow(x):
    return x + 1


@sc.step
def shrink(x):
    return x / 2


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundle") / "programs"
    cache = sc.ProgramCache(directory, verify="off")
    with sc.Session(cache=cache):
        grow(jnp.ones(8))
        shrink(jnp.ones(8))
    cache.flush()
    return directory


@pytest.fixture
def directory(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "programs"))


@pytest.fixture(scope="module")
def file(built, tmp_path_factory):
    """A bundle of everything."""
    path = tmp_path_factory.mktemp("file") / "all.bundle"
    moving.export(opened(built), path)
    return path


def opened(directory):
    return open_archive(directory, None, "off", 0.0)


def take(file, directory, **options):
    return moving.take(directory, file, **options)


def names(directory):
    return {(each.kind, each.digest) for each in DiskStore(directory).entries()}


def run(*arguments, code=0):
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def change_facts(directory, **changes):
    """Lets all builds have been made elsewhere."""
    tier = DiskStore(directory)
    for entry in list(tier.entries("step")):
        records = [
            changed(each, **changes)
            for each in unpack_records(tier.peek("step", entry.digest).payload)
        ]
        label = (entry.header or {})["label"]
        tier.publish("step", entry.digest, *pack_records(label, records))


def changed(record, **changes):
    found = record.dependencies | {name.replace("_", " "): value for name, value in changes.items()}
    return dataclasses.replace(record, dependencies=found, digest=digest_dependencies(found))


# ---- out and in ---------------------------------------------------------------------------------


def test_out_and_in_under_the_same_key(directory, tmp_path):
    before = names(directory)
    tier = DiskStore(directory)
    payloads = {name: tier.peek(*name).payload for name in before}
    result = run("cache", "export", tmp_path / "a.bundle", "--dir", directory)
    assert "2 steps, 2 programs" in result.stdout
    run("cache", "clear", "--yes", "--dir", directory)
    result = run("cache", "import", tmp_path / "a.bundle", "--dir", directory)
    assert result.stdout == "2 steps and 2 programs imported.\n"
    assert {name: tier.peek(*name).payload for name in names(directory)} == payloads


def test_another_directory_has_to_be_told_to_trust(file, tmp_path):
    other = tmp_path / "other"
    refused = run("cache", "import", file, "--dir", other, code=1)
    assert "key of another directory" in refused.stderr and "--trust" in refused.stderr
    assert not names(other)
    result = run("cache", "import", file, "--dir", other, "--trust", "--json")
    found = json.loads(result.stdout)
    assert found["trusted"] == "as asked" and found["programs"] == 2 and not found["foreign"]
    assert sorted(each.rpartition(":")[2] for each in found["steps"]) == ["grow", "shrink"]
    assert not [each for each in DiskStore(other).entries(whole=True) if each.problem]


def test_what_is_there_stays(file, directory):
    program = next(name for name in names(directory) if name[0] == "program")
    tier = DiskStore(directory)
    tier.publish(*program, {"label": "mine"}, b"mine")
    found = take(file, directory)
    assert (found.programs, found.already_there, found.trusted) == (0, 2, "own key")
    assert tier.peek(*program).payload == b"mine"


def test_builds_that_were_there_are_kept(file, directory):
    change_facts(directory, config_jax_enable_x64="'otherwise'")
    take(file, directory)
    take(file, directory)
    tier = DiskStore(directory)
    for step in tier.entries("step"):
        records = unpack_records(tier.peek("step", step.digest).payload)
        assert len(records) == 2
        assert len((step.header or {})["programs"]) == 2
        times = [each.created_time for each in records]
        assert times == sorted(times, reverse=True)


def test_a_shared_cache_counts_as_many_steps_out_as_in(file, directory, tmp_path, monkeypatch):
    """Steps with several builds, each of which has a record of its own there."""
    change_facts(directory, config_jax_enable_x64="'otherwise'")
    take(file, directory)
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    monkeypatch.setenv("STEPCACHE_KEY_FILE", str(key))
    place = f"file://{tmp_path}/shared"
    pushed = run("cache", "push", "--remote", place, "--dir", directory).stdout
    pulled = run("cache", "pull", "--remote", place, "--dir", tmp_path / "other").stdout
    assert "2 steps and 2 programs pushed" in pushed
    assert "2 steps and 2 programs pulled" in pulled


def test_a_name_goes_before_the_beginning_of_a_digest(tmp_path):
    """As that of a step `add`, or `f`."""
    disk = DiskStore(tmp_path)
    for digest, label in (("add1" * 16, "model.py:other"), ("1234" * 16, "model.py:add")):
        disk.publish("step", digest, *pack_records(label, []))
    found = json.loads(run("cache", "show", "add", "--dir", tmp_path, "--json").stdout)
    assert found["label"] == "model.py:add"
    found = json.loads(run("cache", "show", "add1", "--dir", tmp_path, "--json").stdout)
    assert found["label"] == "model.py:other"


def test_export_of_some(directory, tmp_path):
    found = moving.export(opened(directory), tmp_path / "a.bundle", ["grow"])
    assert len(found.steps) == 1 and found.steps[0].endswith(":grow") and found.programs == 1
    other = tmp_path / "other"
    take(tmp_path / "a.bundle", other, trust=True)
    assert len(names(other)) == 2
    run("cache", "export", tmp_path / "b.bundle", "nothing", "--dir", directory, code=1)
    assert not (tmp_path / "b.bundle").exists()


def test_damaged_entries_stay_behind(directory, tmp_path):
    program = next((directory / "v1" / "entries" / "program").iterdir())
    data = bytearray(program.read_bytes())
    data[-1] ^= 1
    program.write_bytes(data)
    found = moving.export(opened(directory), tmp_path / "a.bundle")
    assert (len(found.steps), found.programs) == (1, 1)
    assert "checksum" in found.left_out[0] and "not there" in found.left_out[1]
    assert program.exists(), "a look moves nothing"


def test_an_export_that_fails_leaves_the_old_bundle(directory, tmp_path, monkeypatch):
    path = tmp_path / "a.bundle"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    result = run("cache", "export", path, "--dir", directory, code=1)
    assert "No space left" in result.stderr
    assert path.read_bytes() == b"old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.bundle", "programs"]
    run("cache", "export", tmp_path / "no" / "a.bundle", "--dir", directory, code=1)


# ---- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.7, 0.99, 0.9999])
def test_a_cut_off_bundle_is_refused(file, tmp_path, part):
    data, path = file.read_bytes(), tmp_path / "cut.bundle"
    path.write_bytes(data[: int(len(data) * part)])
    run("cache", "import", path, "--trust", "--dir", tmp_path / "other", code=1)
    assert not names(tmp_path / "other")


def test_any_flipped_bit_is_found(file, built, tmp_path):
    """Under the maker's own key too; but a spoiled HMAC alone just needs trust."""
    data, path = file.read_bytes(), tmp_path / "flipped.bundle"
    directory = Path(shutil.copytree(built, tmp_path / "programs"))
    DiskStore(directory).clear()
    step = max(1, len(data) // 300)
    for position in [*range(0, len(data), step), *range(len(data) - 80, len(data))]:
        spoiled = bytearray(data)
        spoiled[position] ^= 1 << (position % 8)
        path.write_bytes(spoiled)
        with pytest.raises(moving.BundleError) as caught:
            take(path, directory, trust=position < len(data) - 32)
        signed = position < len(data) - 32
        assert isinstance(caught.value, moving.UntrustedBundleError) != signed, position
    assert not names(directory)


def test_more_at_the_end_is_found(file, tmp_path):
    path = tmp_path / "long.bundle"
    path.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(moving.BundleError, match="checksum"):
        take(path, tmp_path / "other", trust=True)


def test_what_is_no_bundle(built, tmp_path, monkeypatch):
    path = tmp_path / "letter.txt"
    path.write_text("hello, " * 100)
    with pytest.raises(moving.BundleError, match="not a bundle of stepcache"):
        take(path, tmp_path / "other", trust=True)
    with tarfile.open(path, "w") as tar:
        bundles.add_member(tar, "letter.txt", b"hello, " * 100)
    with pytest.raises(moving.BundleError, match="not a bundle of stepcache"):
        take(path, tmp_path / "other", trust=True)
    assert not (tmp_path / "other").exists()
    monkeypatch.setattr(bundles, "_FORMAT", "9")
    moving.export(opened(built), path)
    monkeypatch.undo()
    with pytest.raises(moving.BundleError, match="format 9; this stepcache reads 3"):
        take(path, tmp_path / "other", trust=True)
    assert not names(tmp_path / "other")
    run("cache", "import", tmp_path / "missing", "--dir", tmp_path / "other", code=2)


# ---- malice -------------------------------------------------------------------------------------


class Forged(NamedTuple):
    """A member of a forged bundle: its name, the header of its entry, and the payload."""

    name: str
    header: dict
    payload: bytes

    def data(self) -> bytes:
        packed = msgpack.packb(self.header)
        signed = struct.pack("<8sII", b"stepcach", entries.FORMAT_VERSION, len(packed)) + packed
        return signed + hmac.digest(bytes(entries.KEY_BYTES), signed, "sha256") + self.payload


def forge(directory, path, spoil):
    """A bundle with a good checksum and the right key, whose members `spoil` has changed."""
    tier = DiskStore(directory)
    members = []
    for info in [*tier.entries("program"), *tier.entries("step")]:
        stored = entries.store(tier.peek(info.kind, info.digest).payload)
        header = entries.Header(
            *(info.kind, info.digest, 0.0, stored.encoding, len(stored.payload)),
            *(stored.payload_bytes, stored.sha256, info.header or {}),
        )
        name = f"{info.kind}/{info.digest}"
        members.append(Forged(name, dataclasses.asdict(header), stored.payload))
    with path.open("w+b") as out, bundles.signed_tar(out, tier) as tar:
        for each in spoil(members):
            bundles.add_member(tar, each.name, each.data())


def first(name=None, **changes):
    """Changes the header of the first member, and its name as that says, or to `name`."""

    def spoil(members):
        header = members[0].header | changes
        named = f"{header['kind']}/{header['digest']}" if name is None else name
        return [members[0]._replace(name=named, header=header), *members[1:]]

    return spoil


FORGERIES = {
    "a path": first(digest="../../../evil"),
    "an absolute path": first(digest="/etc/evil"),
    "a name that is a path": first("../../../evil"),
    "a name of another entry": first(f"program/{'0' * 64}"),
    "a long name": first(digest="a" * 200),
    "no text": first(digest=7),
    "no name": first(digest=""),
    "an unknown kind": first(kind="key"),
    "a path as kind": first(kind="../v1"),
    "a huge payload": first(payload_bytes=1 << 50),
    "a huge stored size": first(stored_bytes=1 << 50),
    "a negative size": first(stored_bytes=-1),
    "more than zlib can hold": first(payload_bytes=1 << 30),
    "another size": lambda members: first(stored_bytes=members[0].header["stored_bytes"] + 1)(
        members
    ),
    "another checksum": first(sha256=bytes(32)),
    "another encoding": first(encoding="pickle"),
    "no label": first(about={}),
    "no header": first(about=[]),
    "no fields": lambda members: [members[0]._replace(header={}), *members[1:]],
    "twice": lambda members: [members[0], *members],
    "no programs": lambda members: [each for each in members if each.header["kind"] == "step"],
    "nothing": lambda members: [],
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_entry_is_refused(built, tmp_path, name):
    path, other = tmp_path / "forged.bundle", tmp_path / "other"
    forge(built, path, FORGERIES[name])
    with pytest.raises(moving.BundleError, match="refused"):
        take(path, other, trust=True)
    assert not names(other)
    assert not list(tmp_path.rglob("evil"))


def odd(name="program/ab", **fields):
    """A tar header with other fields than a bundle's."""
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


ODD_MEMBERS = {
    "a symbolic link": odd(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": odd(type=tarfile.LNKTYPE, linkname="stepcache-bundle"),
    "a device": odd(type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "a directory": odd(type=tarfile.DIRTYPE),
    "a sparse file": odd(type=tarfile.GNUTYPE_SPARSE),
    "an extended header": odd(type=tarfile.XHDTYPE),
    "a long name": odd(name="program/" + "a" * 300),
    "a name beyond ASCII": odd(name="program/ä"),
    "another owner": odd(uid=1000, uname="somebody"),
    "another mode": odd(mode=0o4755),
    "a size beyond the end": odd(size=1 << 40),
    "a negative size": odd(size=-1024),
}


@pytest.mark.parametrize("name", ODD_MEMBERS)
def test_members_that_export_does_not_write_are_refused(built, tmp_path, name):
    path, other = tmp_path / "odd.bundle", tmp_path / "other"
    with path.open("w+b") as out, bundles.signed_tar(out, DiskStore(built)) as tar:
        header = ODD_MEMBERS[name].tobuf(tarfile.GNU_FORMAT)
        out.write(header)
        tar.offset += len(header)
    with pytest.raises(moving.BundleError, match=r"does not write|not an entry"):
        take(path, other, trust=True)
    assert not names(other)


def test_a_bundle_is_a_tar_file(file, built):
    with tarfile.open(file) as tar:
        (first_name, *others) = tar.getnames()
        assert first_name == "stepcache-bundle" and all(each.isreg() for each in tar)
    assert {tuple(each.split("/")) for each in others} == names(built)
    assert [each.split("/")[0] for each in others] == ["program"] * 2 + ["step"] * 2


SPOILED = {
    "no format": lambda packed: 1,
    "no list": lambda packed: {"a": 1},
    "no records": lambda packed: [],
    "the digest of another": lambda packed: [{**packed[0], "digest": "0" * 64}],
    "a device that is none": lambda packed: [{**packed[0], "devices": ["0"]}],
    "no bytes": lambda packed: [{**packed[0], "call": "text"}],
    "more fields": lambda packed: [{**packed[0], "run": "rm"}],
    "a file that is none": lambda packed: using(packed, files=["/etc/passwd"]),
    "a file of two texts": lambda packed: using(packed, files=[["source", "a"]]),
    "a file of a number": lambda packed: using(packed, files=[["source", "a", 1]]),
    "names that are no text": lambda packed: using(packed, names={"os": ["path"]}),
    "a module that is none": lambda packed: using(packed, modules=[b"os"]),
    "a negative device": lambda packed: [{**packed[0], "devices": [-1]}],
    "a time that is none": lambda packed: [{**packed[0], "created_time": "now"}],
    "an array that is none": lambda packed: [{**packed[0], "captured": [["a", "f32[]"]]}],
}


def using(packed, **changes):
    return [{**packed[0], "used": {**packed[0]["used"], **changes}}]


@pytest.mark.parametrize("name", SPOILED)
def test_a_forged_step_is_refused(directory, tmp_path, name):
    tier = DiskStore(directory)
    step = next(iter(tier.entries("step")))
    data = msgpack.unpackb(tier.peek("step", step.digest).payload, strict_map_key=False)
    spoiled = SPOILED[name](data["records"])
    payload = msgpack.packb({**data, "records": spoiled} if spoiled != 1 else spoiled)
    tier.publish("step", step.digest, step.header or {}, payload or b"")
    path, other = tmp_path / "forged.bundle", tmp_path / "other"
    forge(directory, path, list)
    with pytest.raises(moving.BundleError, match="malformed"):
        take(path, other, trust=True)
    assert not names(other)


# ---- environments -------------------------------------------------------------------------------


def test_a_foreign_environment_is_refused_with_what_differs(directory, tmp_path):
    change_facts(directory, package_jaxlib="0.0.1", environment_system="Plan9 mips")
    path, other = tmp_path / "a.bundle", tmp_path / "other"
    moving.export(opened(directory), path)
    refused = run("cache", "import", path, "--trust", "--dir", other, code=1)
    assert "another environment" in refused.stderr and "--anyway" in refused.stderr
    assert "package jaxlib" in refused.stdout and "0.0.1" in refused.stdout
    assert "Plan9 mips" in refused.stdout and "package jax " not in refused.stdout
    assert not names(other)
    result = run("cache", "import", path, "--trust", "--dir", other, "--json", code=1)
    parts = {each["part"]: each for each in json.loads(result.stdout)["foreign"]}
    assert parts.keys() == {"package jaxlib", "environment system"}
    assert parts["package jaxlib"]["here"] == importlib.metadata.version("jaxlib")
    result = run("cache", "import", path, "--trust", "--anyway", "--dir", other)
    assert "2 steps and 2 programs imported" in result.stdout and "Plan9" in result.stdout
    assert len(names(other)) == 4


def test_steps_of_this_environment_come_without_the_others(directory, tmp_path):
    tier = DiskStore(directory)
    entry = next(each for each in tier.entries("step") if "grow" in (each.header or {})["label"])
    records = unpack_records(tier.peek("step", entry.digest).payload)
    foreign = [changed(each, package_numpy="0.1") for each in records]
    tier.publish("step", entry.digest, *pack_records("x.py:grow", foreign))
    moving.export(opened(directory), tmp_path / "a.bundle")
    other = tmp_path / "other"
    found = take(tmp_path / "a.bundle", other, trust=True)
    assert found.refused == ("x.py:grow",) and len(found.steps) == 1
    assert [part.part for part in found.foreign] == ["package numpy"]
    assert len(names(other)) == 2, "nor their programs"


FACTS = {
    "environment backend": "cuda 13",
    "environment devices": "8, 8 local",
    "environment processes": "2",
    "environment topology": "ab",
    "package numpy": "2.0",
}


@pytest.mark.parametrize(
    ("facts", "parts"),
    [
        (FACTS, []),
        (FACTS | {"environment devices": "4, 4 local"}, []),
        (FACTS | {"environment devices": "64, 16 local"}, ["environment devices"]),
        (FACTS | {"environment topology": "cd"}, ["environment topology"]),
        (FACTS | {"package stepcache": "0.0"}, ["package stepcache"]),
        (FACTS | {"package no_such_package": "1.0"}, ["package no_such_package"]),
        (FACTS | {"environment XLA_FLAGS": "--xla_fast", "config jax_enable_x64": "True"}, []),
    ],
)
def test_what_makes_an_environment_foreign(facts, parts):
    assert [each.part for each in foreign_parts(facts, FACTS)] == parts


def test_the_number_of_cpu_devices_is_a_process_own_affair():
    here = FACTS | {"environment backend": "cpu cpu"}
    there = here | {"environment devices": "64, 64 local", "environment topology": "cd"}
    assert foreign_parts(there, here) == []
    (part,) = settings_that_differ(there, here)
    assert (part.part, part.bundle, part.here) == (
        "environment devices",
        "64, 64 local",
        "8, 8 local",
    )


def test_settings_that_a_process_has_to_make():
    there = FACTS | {"environment XLA_FLAGS": "--xla_fast", "config jax_enable_x64": "True"}
    here = FACTS | {"config jax_enable_x64": "False", "environment LIBTPU_INIT_ARGS": "--a"}
    parts = {each.part: (each.bundle, each.here) for each in settings_that_differ(there, here)}
    assert parts == {
        "environment XLA_FLAGS": ("--xla_fast", "absent"),
        "environment LIBTPU_INIT_ARGS": ("absent", "--a"),
        "config jax_enable_x64": ("True", "False"),
    }


# ---- what it is for -----------------------------------------------------------------------------

SCRIPT = """
import json, sys
import jax
import jax.numpy as jnp
import stepcache as sc

@sc.step(carry="state")
def train_step(state, batch):
    return {"w": state["w"] - 0.1 * batch.mean()}, (state["w"] * batch).sum()

cache = sc.ProgramCache(sys.argv[1], verify="off")
with sc.Session(cache=cache):
    state, loss = train_step({"w": jnp.ones(4)}, jnp.arange(4.0))
cache.flush()
stats = train_step.stats()
told = {"traces": stats.traces, "loads": stats.loads, "loss": float(loss)}
print(json.dumps(told | {"why": str(train_step.last_miss)}))
"""


def test_another_directory_starts_without_a_trace(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def train(directory):
        command = [sys.executable, str(script), str(directory)]
        variables = {**os.environ, "STEPCACHE_DIR": "off", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    here, there = tmp_path / "here", tmp_path / "there"
    cold = train(here)
    assert cold["traces"] == 1
    run("cache", "export", tmp_path / "a.bundle", "--dir", here)
    # In a process of its own, as on another machine: this one has eight devices.
    command = [sys.executable, "-m", "stepcache.cli", "cache", "import", str(tmp_path / "a.bundle")]
    command += ["--trust", "--dir", str(there)]
    subprocess.run(command, check=True, timeout=120)
    warm = train(there)
    assert (warm["traces"], warm["loads"]) == (0, 1), warm["why"]
    assert warm["loss"] == cold["loss"]


KINDS = """
import json, os, sys, warnings
from pathlib import Path
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stepcache as sc
from jax.sharding import AxisType, PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent / "site-packages"))
import finders
Path("relative.txt").write_text("3.0")

@sc.step
def reads_a_file_beside_the_source(x):
    return x * float(Path(__file__).with_name("scale.txt").read_text())

@sc.step
def reads_a_relative_file(x):
    return x * float(Path("relative.txt").read_text())

@sc.step
def reads_a_file_elsewhere(x):
    return x * float(Path(os.environ["ELSEWHERE"]).read_text())

@sc.step
def reads_the_environment(x):
    return x * float(os.environ["RATE"])

@sc.step
def imports(x):
    import turtledemo
    return x + len(turtledemo.__name__)

@sc.step(static_argnames=("train",), carry="state")
def train(state, batch, train=True):
    grads = jax.grad(lambda s: ((s["w"] * batch) ** 2).mean())(state)
    updates, _ = optax.sgd(0.1).update(grads, optax.sgd(0.1).init(state))
    return optax.apply_updates(state, updates), grads["w"].sum() if train else None

big = jnp.arange(4096.0)

@sc.step
def captures(x):
    return jax.random.key(0), x + big.sum()

@sc.step
def same(x):
    return x

cache = sc.ProgramCache(sys.argv[1], verify="off")
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
steps = [reads_a_file_beside_the_source, reads_a_relative_file, reads_a_file_elsewhere]
steps += [reads_the_environment, imports, captures]
with sc.Session(cache=cache):
    for step in steps:
        step(jnp.ones(4))
    train({"w": jnp.ones(4)}, jnp.arange(4.0))
with sc.Session(mesh, cache=cache):
    same(np.ones(4, np.float16))
cache.flush()
told = {step.__name__: [step.stats().traces, str(step.last_miss)] for step in (*steps, train, same)}
print(json.dumps(told))
"""

FINDERS = """
import sys

class Finder:
    def find_spec(self, name, path, target=None):
        return getattr(self, "another_" + name, lambda: None)()

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
def test_steps_of_every_kind_move_to_another_directory(tmp_path):
    """Without a trace there, whatever the trace read here; import hooks are not part of it."""
    script, elsewhere = tmp_path / "train.py", tmp_path / "elsewhere.txt"
    script.write_text(KINDS)
    (tmp_path / "scale.txt").write_text("2.0")
    elsewhere.write_text("5.0")
    site = tmp_path / "site-packages"
    (site / "finders-1.0.dist-info").mkdir(parents=True)
    (site / "finders-1.0.dist-info" / "METADATA").write_text("Name: finders\nVersion: 1.0\n")
    (site / "finders.py").write_text(FINDERS)
    variables = {**os.environ, "STEPCACHE_DIR": "off", "JAX_PLATFORMS": "cpu", "RATE": "2"}
    variables["ELSEWHERE"] = str(elsewhere)
    variables["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

    def run_python(*arguments):
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "a.bundle"
    cold = json.loads(run_python(script, here))
    assert all(traces == 1 for traces, _ in cold.values())
    run_python("-m", "stepcache.cli", "cache", "export", file, "--dir", here)
    shutil.rmtree(site)
    site.mkdir()
    (site / "finders.py").write_text("")
    found = run_python(
        *("-m", "stepcache.cli", "cache", "import", file, "--trust", "--json", "--dir", there)
    )
    assert not json.loads(found)["foreign"]
    assert len(json.loads(found)["steps"]) == len(cold)
    warm = json.loads(run_python(script, there))
    assert {name: traces for name, (traces, _) in warm.items()} == dict.fromkeys(cold, 0), warm
