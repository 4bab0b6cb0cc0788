"""The disk tier: nothing is handed out that was not stored, whatever is done to its files."""

import concurrent.futures
import contextlib
import errno
import json
import logging
import os
import random
import secrets
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import stepcache as sc
from stepcache.link.processes import Process, unique_name
from stepcache.storage import entry as format_
from stepcache.storage import private_files
from stepcache.storage.disk_store import DiskStore

DIGEST = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
NOW = 1_800_000_000.0


class Clock:
    """Says what it was told."""

    def __init__(self, now=NOW):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def tier(directory, clock):
    return DiskStore(directory, clock=clock)


@pytest.fixture
def unsynced(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def path_of(tier, digest=DIGEST, kind="program"):
    return Path(tier.directory) / "v2" / "entries" / kind / digest


def inside(tier, name):
    return sorted(path.name for path in (Path(tier.directory) / "v2" / name).iterdir())


def refusal(tier):
    """The one reason for which something was refused."""
    (refused,) = tier.quarantined
    return refused.reason


# What is stored


@pytest.mark.parametrize("payload", [b"", b"x", bytes(100_000), random.Random(1).randbytes(5_000)])
def test_what_was_published_is_read(tier, clock, payload):
    header = {"parts": {"mesh": "4 × 2", 3: None}, "bytes": b"\x00\xff", "odd": "\udcff", "f": 0.5}
    assert tier.publish("program", DIGEST, header, payload)
    clock.now += 5
    for each in (tier, DiskStore(tier.directory)):
        entry = each.read("program", DIGEST)
        assert (entry.header, entry.payload) == (header, payload)
        assert (entry.created_time, entry.used_time) == (NOW, NOW)
        assert entry.size_bytes == path_of(tier).stat().st_size == tier.size_bytes()
    assert not inside(tier, "tmp")


def test_kinds_are_apart(tier):
    tier.publish("program", DIGEST, {}, b"program")
    tier.publish("step", DIGEST, {}, b"step")
    assert tier.read("program", DIGEST).payload == b"program"
    assert tier.read("step", DIGEST).payload == b"step"
    assert [info.kind for info in tier.entries("step")] == ["step"]


def test_a_payload_is_compressed_where_that_helps(tier):
    tier.publish("program", DIGEST, {}, bytes(100_000))
    tier.publish("program", OTHER, {}, random.Random(1).randbytes(100_000))
    assert path_of(tier).stat().st_size < 2_000
    assert path_of(tier, OTHER).stat().st_size < 101_000


@pytest.mark.parametrize(
    ("kind", "digest", "where"),
    [
        ("../x", DIGEST, "kind"),
        ("", DIGEST, "kind"),
        ("Program", DIGEST, "kind"),
        ("a" * 25, DIGEST, "kind"),
        (None, DIGEST, "kind"),
        ("program", "../../key", "digest"),
        ("program", "", "digest"),
        ("program", "AB", "digest"),
        ("program", "ab\n", "digest"),
        ("program", "a" * 129, "digest"),
        ("program", b"ab", "digest"),
    ],
)
def test_names_that_could_be_paths_are_refused(tier, kind, digest, where):
    for action in (
        lambda: tier.read(kind, digest),
        lambda: tier.publish(kind, digest, {}, b""),
        lambda: tier.discard(kind, digest, "reason"),
        lambda: tier.loading(kind, digest).__enter__(),
    ):
        with pytest.raises(sc.OptionError) as raised:
            action()
        assert raised.value.where == where


def test_the_longest_name_can_be_marked_published_and_set_aside(tier):
    kind, digest = "k" * 24, "d" * 128
    with tier.loading(kind, digest):
        assert len(inside(tier, "loading")) == 1
        assert tier.publish(kind, digest, {}, b"x")
    tier.discard(kind, digest, "test")
    assert len(inside(tier, "quarantine")) == 1


@pytest.mark.parametrize("header", [{"x": object()}, {"x": 1 << 70}, {"x": bytes(17 << 20)}])
def test_a_header_that_cannot_be_kept_is_an_error(tier, header):
    with pytest.raises(sc.OptionError, match="header"):
        tier.publish("program", DIGEST, header, b"")
    assert tier.writable and tier.publish("program", DIGEST, {"x": bytes(500)}, b"")


def test_max_bytes_must_be_positive(directory):
    with pytest.raises(sc.OptionError, match="max_bytes"):
        DiskStore(directory, 0)


# Damage


def flip_a_bit(path, chance, _):
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path, chance, _):
    os.truncate(path, chance.randrange(path.stat().st_size))


def empty(path, *_):
    path.write_bytes(b"")


def fill_with_zeros(path, chance, _):
    size = path.stat().st_size
    if chance.random() < 0.3:
        path.write_bytes(bytes(size))
        return
    content = path.read_bytes()  # What a file system can leave of a page that was never written.
    start = chance.randrange(size // 2)
    path.write_bytes(content[:start] + bytes(size - start))


def append_garbage(path, chance, _):
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 200)))


def insert_garbage(path, chance, _):
    content = path.read_bytes()
    place = chance.randrange(len(content))
    path.write_bytes(content[:place] + b"\x00" + content[place:])


def write_garbage(path, chance, _):
    path.write_bytes(chance.randbytes(chance.randint(1, 5_000)))


def claim_another_format(path, chance, _):
    content = bytearray(path.read_bytes())
    content[8:12] = struct.pack("<I", chance.choice([0, 1, 3, 1 << 31]))
    path.write_bytes(content)


def claim_a_large_header(path, chance, _):
    content = bytearray(path.read_bytes())
    content[12:16] = struct.pack("<I", chance.choice([1 << 24, (1 << 24) + 1, (1 << 32) - 1, 5000]))
    path.write_bytes(content)


def forge(path, *, key, payload=b"something else"):
    """Writes what a holder of `key` could write."""
    path.write_bytes(b"".join(format_.encode(key, "program", DIGEST, NOW, {}, payload)))


def sign_with_another_key(path, chance, _):
    forge(path, key=chance.randbytes(32))


def take_the_place_of_another(path, chance, tier):
    kind = chance.choice(["program", "step"])
    tier.publish(kind, OTHER if kind == "program" else DIGEST, {}, b"of another")
    path.write_bytes(path_of(tier, OTHER if kind == "program" else DIGEST, kind).read_bytes())


def put_a_directory_there(path, chance, _):
    path.unlink()
    path.mkdir()
    if chance.random() < 0.5:
        (path / "file").write_bytes(b"x")


def put_a_link_there(path, chance, tier):
    away = Path(tier.directory) / "elsewhere"
    path.rename(away)
    path.symlink_to(away if chance.random() < 0.5 else Path("nowhere"))


def put_a_pipe_there(path, *_):
    path.unlink()
    os.mkfifo(path)


def misstate_the_stored(path, chance, tier):
    """An authentic header that lies, as one of another version may."""
    key = (Path(tier.directory) / "v2" / "key").read_bytes()
    lie = chance.choice([{"stored_bytes": "1000"}, {"sha256": bytes(32)}, {"about": None}])
    with pytest.MonkeyPatch.context() as patch:
        fields = format_.plain.fields_of
        patch.setattr(format_.plain, "fields_of", lambda header: fields(header) | lie)
        forge(path, key=key)


DAMAGES = {
    flip_a_bit: 300,
    truncate: 200,
    empty: 5,
    fill_with_zeros: 75,
    append_garbage: 60,
    insert_garbage: 75,
    write_garbage: 50,
    claim_another_format: 30,
    claim_a_large_header: 30,
    sign_with_another_key: 50,
    take_the_place_of_another: 30,
    put_a_directory_there: 20,
    put_a_link_there: 20,
    put_a_pipe_there: 10,
    misstate_the_stored: 60,
}


def test_there_are_a_thousand_damages():
    assert sum(DAMAGES.values()) >= 1000


@pytest.mark.parametrize("one_of", [10, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_what_is_damaged_is_not_read(tier, clock, damage, one_of, unsynced, caplog):
    caplog.set_level(logging.CRITICAL, "stepcache")  # A thousand reports are not wanted.
    chance = random.Random(damage.__name__)
    for number in range(max(5, DAMAGES[damage] // one_of)):
        clock.now += 1
        payload = chance.randbytes(chance.randint(0, 3_000)) + bytes(chance.choice([0, 3_000]))
        assert tier.publish("program", DIGEST, {"number": number}, payload)
        damage(path_of(tier), chance, tier)
        set_aside = set(inside(tier, "quarantine"))
        assert tier.read("program", DIGEST) is None, number
        assert tier.quarantined[-1][:2] == ("program", DIGEST)
        assert not os.path.lexists(path_of(tier))
        (name,) = set(inside(tier, "quarantine")) - set_aside
        assert f".program.{DIGEST}." in name
        assert len(tier.quarantined) == min(number + 1, 256), "refused once"
        assert tier.publish("program", DIGEST, {"number": number}, payload)
        assert tier.read("program", DIGEST).payload == payload


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_publish_over_what_is_damaged_is_readable(tier, damage):
    tier.publish("program", DIGEST, {}, b"payload" * 100)
    damage(path_of(tier), random.Random(1), tier)
    assert tier.publish("program", DIGEST, {}, b"new")
    assert tier.read("program", DIGEST).payload == b"new" and not tier.quarantined


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "cut off|bytes where .* were written"),
        (write_garbage, "not an entry of stepcache"),
        (claim_another_format, r"has format \d+; this stepcache reads 2"),
        (sign_with_another_key, "under another key"),
        (take_the_place_of_another, f"was stored as program {OTHER}"),
        (put_a_directory_there, "cannot be read"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_reason_is_told(tier, damage, reason, caplog):
    tier.publish("program", DIGEST, {}, random.Random(3).randbytes(1000))
    damage(path_of(tier), random.Random(2), tier)
    tier.read("program", DIGEST)
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert told.name == "stepcache" and refusal(tier) in told.getMessage()
    assert DIGEST in told.getMessage() and str(tier.directory) in told.getMessage()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refusal(tier))


def test_what_cannot_be_read_is_refused(tier, monkeypatch):
    tier.publish("program", DIGEST, {}, b"payload")
    with failing(monkeypatch, "open", errno.EACCES, lambda path, *_: str(path).endswith(DIGEST)):
        assert tier.read("program", DIGEST) is None
    assert "cannot be read" in refusal(tier) and not path_of(tier).exists()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ESTALE])
def test_what_is_not_the_fault_of_the_file_is_only_a_miss(tier, monkeypatch, code):
    tier.publish("program", DIGEST, {}, b"payload")
    with failing(monkeypatch, "open", code, lambda path, *_: str(path).endswith(DIGEST)):
        assert tier.read("program", DIGEST) is None
    assert tier.read("program", DIGEST).payload == b"payload" and not tier.quarantined


def test_what_is_bad_and_cannot_be_moved_is_not_looked_at_again(tier, monkeypatch):
    tier.publish("program", DIGEST, {}, b"x")
    os.truncate(path_of(tier), 10)
    with failing(monkeypatch, "rename", errno.EIO), failing(monkeypatch, "unlink", errno.EIO):
        for _ in range(2):
            assert tier.read("program", DIGEST) is None
    assert len(tier.quarantined) == 1 and path_of(tier).exists()
    assert tier.publish("program", DIGEST, {}, b"new")
    assert tier.read("program", DIGEST).payload == b"new"


def test_what_was_published_since_it_was_looked_at_is_not_set_aside(tier, monkeypatch):
    tier.publish("program", DIGEST, {}, b"old")
    os.truncate(path_of(tier), 100)
    original = format_.read_header

    def slow(*arguments):
        DiskStore(tier.directory).publish("program", DIGEST, {}, b"new")
        return original(*arguments)

    monkeypatch.setattr("stepcache.storage.disk_store.read_header", slow)
    assert tier.read("program", DIGEST) is None
    monkeypatch.undo()
    assert tier.read("program", DIGEST).payload == b"new"


def test_the_newest_in_quarantine_are_kept(tier, clock):
    for number in range(20):
        clock.now += 1
        tier.publish("program", f"{number:02x}", {}, b"x")
        tier.discard("program", f"{number:02x}", "test")
    kept = [name.split(".")[2] for name in inside(tier, "quarantine")]
    assert kept == [f"{number:02x}" for number in range(4, 20)]


def test_the_memory_of_refusals_is_bounded(tier, caplog):
    caplog.set_level(logging.CRITICAL, "stepcache")
    for number in range(300):
        tier.discard("program", f"{number:04x}", "test")
    assert len(tier.quarantined) == 256 and tier.quarantined[-1].digest == f"{299:04x}"


def test_discard(tier):
    for digest in (DIGEST, OTHER):
        tier.publish("program", digest, {}, b"x")
    tier.discard("program", DIGEST, "it does not load")
    assert tuple(tier.quarantined) == (("program", DIGEST, "it does not load"),)
    assert [name.split(".")[2] for name in inside(tier, "quarantine")] == [DIGEST]
    assert tier.read("program", DIGEST) is None and tier.read("program", OTHER)
    assert tier.publish("program", DIGEST, {}, b"new") and tier.read("program", DIGEST)


# The key


def test_the_key_is_for_the_user_alone(tier):
    key = Path(tier.directory) / "v2" / "key"
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    for path in (tier.directory, key.parent, path_of(tier).parent.parent):
        assert Path(path).stat().st_mode & 0o777 == 0o700


def write_few_bytes(key):
    key.write_bytes(b"short")


def write_many_bytes(key):
    key.write_bytes(bytes(33))


def let_others_write(key):
    key.chmod(0o620)


@pytest.mark.parametrize(
    "damage", [write_few_bytes, write_many_bytes, let_others_write, Path.unlink]
)
def test_a_bad_key_is_replaced_and_old_entries_are_foreign(tier, damage):
    tier.publish("program", DIGEST, {}, b"old")
    key = Path(tier.directory) / "v2" / "key"
    before = key.read_bytes()
    damage(key)
    again = DiskStore(tier.directory)
    assert len(key.read_bytes()) == 32 and key.read_bytes() != before
    assert key.stat().st_mode & 0o777 == 0o600
    assert again.read("program", DIGEST) is None and "another key" in refusal(again)
    # The tier that was open takes up the new key.
    assert again.publish("program", DIGEST, {}, b"new")
    assert tier.read("program", DIGEST).payload == b"new" and not tier.quarantined
    assert tier.publish("program", OTHER, {}, b"new") and again.read("program", OTHER)


def test_all_who_open_at_once_get_one_key(directory):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        tiers = list(pool.map(lambda _: DiskStore(directory), range(16)))
    for number, each in enumerate(tiers):
        assert each.publish("program", f"{number:02x}", {}, b"x")
    assert all(tiers[0].read("program", f"{number:02x}") for number in range(16))
    assert not inside(tiers[0], "tmp")


def test_the_key_of_a_faster_process_is_taken(directory, monkeypatch):
    tiers = []
    original = secrets.token_bytes

    def make_key_after_another(length):
        if length != 32 or tiers:
            return original(length)
        monkeypatch.undo()
        tiers.append(DiskStore(directory))
        tiers[0].publish("program", DIGEST, {}, b"x")
        return b"k" * length

    monkeypatch.setattr(secrets, "token_bytes", make_key_after_another)
    tiers.append(DiskStore(directory))
    assert tiers[1].read("program", DIGEST) and len(tiers) == 2
    assert (directory / "v2" / "key").read_bytes() != b"k" * 32


def test_a_file_system_without_hard_links_will_do(directory, monkeypatch):
    with failing(monkeypatch, "link", errno.EPERM):
        tier = DiskStore(directory)
    assert tier.publish("program", DIGEST, {}, b"x") and DiskStore(directory).read(
        "program", DIGEST
    )


# The directory


def test_missing_parents_are_made_for_the_user_alone(tmp_path):
    before = os.umask(0o002)
    try:
        tier = DiskStore(tmp_path / "a" / "b" / "cache")
        assert tier.publish("program", DIGEST, {}, b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
@pytest.mark.parametrize("which", ["cache", "cache/v2"])
def test_a_directory_that_others_can_write_to_is_refused(tier, directory, mode, which):
    path = directory.parent / which
    path.chmod(mode)
    with pytest.raises(sc.CacheDirectoryError) as raised:
        DiskStore(directory)
    text = str(raised.value)
    assert f"{mode:04o}" in text and f"chmod 700 {path}" in text and "STEPCACHE_DIR" in text


def test_a_directory_that_others_can_read_is_not(directory, tier):
    directory.chmod(0o755)
    assert DiskStore(directory).writable


def test_a_directory_of_another_user_is_refused(tier, directory, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(sc.CacheDirectoryError, match="another user") as raised:
        DiskStore(directory)
    assert raised.value.expected == "owner 12345" and "STEPCACHE_DIR" in raised.value.hint


def test_a_link_is_judged_by_where_it_leads(tmp_path, tier, directory):
    link = tmp_path / "link"
    link.symlink_to(directory)
    tier.publish("program", DIGEST, {}, b"x")
    assert DiskStore(link).read("program", DIGEST)
    directory.chmod(0o777)
    with pytest.raises(sc.CacheDirectoryError, match="0777"):
        DiskStore(link)


def test_the_parent_must_not_let_others_replace_the_directory(tmp_path):
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(sc.CacheDirectoryError, match="0777") as raised:
        DiskStore(parent / "cache")
    assert f"chmod go-w {parent}" in raised.value.hint
    (tmp_path / "link").symlink_to(parent / "cache")
    with pytest.raises(sc.CacheDirectoryError, match="0777"):
        DiskStore(tmp_path / "link")
    (tmp_path / "safe").mkdir(mode=0o700)
    (parent / "link").symlink_to(tmp_path / "safe")
    with pytest.raises(sc.CacheDirectoryError, match="0777"):
        DiskStore(parent / "link")
    parent.chmod(0o1777)
    assert DiskStore(parent / "cache").writable


def test_a_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(sc.CacheDirectoryError, match="not a directory"):
        DiskStore(tmp_path / "file")


def test_the_directory_can_vanish(tier):
    tier.publish("program", DIGEST, {}, b"x")
    shutil.rmtree(tier.directory)
    assert tier.read("program", DIGEST) is None
    with tier.loading("program", DIGEST):
        assert tier.read("program", DIGEST) is None
    assert (list(tier.entries()), tier.size_bytes(), tier.prune(0), tier.clear()) == ([], 0, [], 0)
    assert tier.publish("program", DIGEST, {}, b"y")
    assert tier.read("program", DIGEST).payload == b"y" and not tier.quarantined
    assert DiskStore(tier.directory).read("program", DIGEST)


def test_a_directory_put_in_its_place_by_another_is_not_trusted(tier, tmp_path, monkeypatch):
    tier.publish("program", DIGEST, {}, b"x")
    tier.directory.rename(tmp_path / "away")
    forged = DiskStore(tier.directory)
    forged.publish("program", DIGEST, {}, b"evil")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # To us, it now belongs to somebody else.
    assert tier.read("program", DIGEST) is None and "another key" in refusal(tier)
    with pytest.warns(sc.StepCacheWarning, match="another user"):
        assert not tier.publish("program", OTHER, {}, b"x")


def test_the_key_in_a_directory_that_is_open_by_now_is_not_trusted(tier, tmp_path):
    tier.publish("program", DIGEST, {}, b"x")
    tier.directory.rename(tmp_path / "away")
    DiskStore(tier.directory).publish("program", DIGEST, {}, b"evil")
    tier.directory.chmod(0o777)
    assert tier.read("program", DIGEST) is None and "another key" in refusal(tier)


def test_the_process_may_change_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tier = DiskStore(Path("cache"))
    assert tier.publish("program", DIGEST, {}, b"x") and tier.directory == Path("cache")
    monkeypatch.chdir("/")
    assert tier.read("program", DIGEST)


# Where nothing can be written


@contextlib.contextmanager
def failing(monkeypatch, name, code, when=lambda *_: True):
    """A function of `os` that fails with `code` where its arguments are such."""
    original = getattr(os, name)

    def fail(*arguments, **keywords):
        if when(*arguments):
            raise OSError(code, os.strerror(code), str(arguments[0]))
        return original(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


def creates(path, flags, *_):
    return bool(flags & os.O_CREAT)


def after(calls):
    """A condition that holds from the call of that number on."""
    left = [calls]

    def holds(*_):
        left[0] -= 1
        return left[0] < 0

    return holds


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk(tier, monkeypatch, caplog, name, code):
    assert tier.publish("program", DIGEST, {}, b"x" * 100)
    with failing(monkeypatch, name, code):
        with pytest.warns(sc.StepCacheWarning, match=os.strerror(code)) as warned:
            assert not tier.publish("program", DIGEST, {}, b"y" * 100)
            assert not tier.publish("program", OTHER, {}, b"z")
    assert len(warned) == 1 and str(tier.directory) in str(warned[0].message)
    assert warned[0].filename == __file__ and not caplog.records, "it is said once"
    assert not tier.writable and not inside(tier, "tmp")
    assert not tier.publish("program", OTHER, {}, b"z"), "from now on"
    assert tier.read("program", DIGEST).payload == b"x" * 100
    os.truncate(path_of(tier), 10)
    assert tier.read("program", DIGEST) is None and len(inside(tier, "quarantine")) == 1


def test_a_shortage_of_the_moment_is_no_reason_to_stop(tier, monkeypatch):
    with failing(monkeypatch, "open", errno.EMFILE, creates):
        assert not tier.publish("program", DIGEST, {}, b"x")
    assert tier.writable and tier.publish("program", DIGEST, {}, b"x")


def test_a_failure_to_write_the_directory_is_none(tier, monkeypatch):
    assert tier.publish("program", DIGEST, {}, b"x")
    with failing(monkeypatch, "fsync", errno.EINVAL, after(1)):
        assert tier.publish("program", OTHER, {}, b"x")
    assert tier.read("program", OTHER)


def test_a_file_system_that_sets_no_times_keeps_its_own(tier, monkeypatch):
    with failing(monkeypatch, "utime", errno.EPERM):
        assert tier.publish("program", DIGEST, {}, b"x")
    assert tier.read("program", DIGEST).payload == b"x"


def forbid_writes(monkeypatch):
    """All that is done to files fails from now on."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    names = "mkdir rename replace unlink rmdir link symlink utime truncate write chmod fsync"
    for name in names.split():
        monkeypatch.setattr(os, name, refuse)
    original = os.open

    def open_to_read(path, flags, *arguments, **keywords):
        is_write = flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
        return (refuse if is_write else original)(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", open_to_read)


def test_a_read_only_directory_serves_reads(tier, directory, clock, monkeypatch):
    for digest in (DIGEST, OTHER):
        tier.publish("program", digest, {}, b"x" * 100)
    os.truncate(path_of(tier, OTHER), 20)
    clock.now += 1000
    forbid_writes(monkeypatch)
    reader = DiskStore(directory, clock=clock)
    with reader.loading("program", DIGEST):
        assert reader.read("program", DIGEST).payload == b"x" * 100
    for _ in range(3):
        assert reader.read("program", OTHER) is None
    assert [info.problem is None for info in reader.entries(whole=True)].count(True) == 1
    with pytest.warns(sc.StepCacheWarning, match=os.strerror(errno.EROFS)) as warned:
        assert not reader.publish("program", DIGEST, {}, b"y")
        assert not reader.publish("program", DIGEST, {}, b"y")
    assert len(warned) == 1 and not reader.writable
    assert {refused.digest for refused in reader.quarantined} == {OTHER}


def test_a_read_only_entry_that_killed_its_loader_is_refused(tier, directory, clock, monkeypatch):
    tier.publish("program", DIGEST, {}, b"x")
    leave_marker(tier, ended_process())
    forbid_writes(monkeypatch)
    reader = DiskStore(directory, clock=clock)
    for _ in range(2):
        assert reader.read("program", DIGEST) is None
    assert "ended while it was loading it" in refusal(reader)


@pytest.mark.skipif(os.geteuid() == 0, reason="the modes of files do not bind root")
def test_a_directory_without_write_permission(tier, directory):
    tier.publish("program", DIGEST, {}, b"x")
    places = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    try:
        for path in places:
            path.chmod(0o500)
        assert DiskStore(directory).read("program", DIGEST)
    finally:
        for path in places:
            path.chmod(0o700)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_directory_that_cannot_be_made(directory, monkeypatch, code):
    with failing(monkeypatch, "mkdir", code):
        tier = DiskStore(directory)
    assert not tier.writable and tier.read("program", DIGEST) is None
    assert (list(tier.entries()), tier.size_bytes(), tier.clear()) == ([], 0, 0)
    with tier.loading("program", DIGEST), pytest.warns(sc.StepCacheWarning):
        assert not tier.publish("program", DIGEST, {}, b"x")


def test_a_link_to_nowhere_is_told_at_the_first_publish(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    tier = DiskStore(tmp_path / "link")
    with pytest.warns(sc.StepCacheWarning, match="No such file"):
        assert not tier.publish("program", DIGEST, {}, b"x")


# Least recently used first out; the rules that memory has too are in test_tiers.py


def test_kinds_share_the_bound(directory, clock):
    tier = DiskStore(directory, 3_000, clock=clock)
    for kind in ("step", "program", "note"):
        clock.now += 1
        tier.publish(kind, DIGEST, {}, random.Random(1).randbytes(1_000))
    assert {info.kind for info in tier.entries()} == {"program", "note"}


def test_a_use_is_noted_once_a_minute(tier, clock, monkeypatch):
    tier.publish("program", DIGEST, {}, b"x")
    noted = []
    original = os.utime
    monkeypatch.setattr(os, "utime", lambda *a, **k: (noted.append(a), original(*a, **k)))
    for seconds in (30, 29, 1, 59, 1):
        clock.now += seconds
        used_time = tier.read("program", DIGEST).used_time
    assert len(noted) == 2 and used_time == NOW + 60
    assert tier.read("program", DIGEST).used_time == NOW + 120
    clock.now -= 10_000  # A clock that was wrong leaves no entry that is never evicted.
    tier.read("program", DIGEST)
    assert path_of(tier).stat().st_mtime == clock.now


def test_another_process_may_have_filled_the_directory(directory, clock):
    tiers = [DiskStore(directory, 20_000, clock=clock) for _ in range(2)]
    for number in range(200):
        clock.now += 1
        payload = random.Random(number).randbytes(1_000)
        tiers[number % 2].publish("program", f"{number:02x}", {}, payload)
    assert tiers[0].size_bytes() <= 20_000 + 20_000 // 8
    assert {info.digest for info in tiers[0].entries()} >= {
        f"{each:02x}" for each in range(190, 200)
    }


def test_prune(tier, clock):
    for number in range(4):
        clock.now += 1
        tier.publish("program", f"{number:02x}", {"number": number}, bytes(100))
    each = tier.size_bytes() // 4
    removed = tier.prune(2 * each)
    assert [info.header["number"] for info in removed] == [0, 1]
    assert {info.digest for info in tier.entries()} == {"02", "03"}
    assert tier.prune(2 * each) == [] and len(tier.prune(unused_since=NOW + 3)) == 1
    assert len(tier.prune(0)) == 1
    assert tier.size_bytes() == 0


def test_files_that_vanish_between_two_looks_are_no_error(tier, monkeypatch):
    for number in range(4):
        tier.publish("program", f"{number:02x}", {}, bytes(100))
    original = Path.iterdir

    def listed_then_gone(path):
        listed = list(original(path))
        if path.name == "program":
            for each in listed[:2]:
                each.unlink()
        return iter(listed)

    monkeypatch.setattr(Path, "iterdir", listed_then_gone)
    assert len(list(tier.entries())) == 2
    assert tier.clear() == 0


# What is listed


def test_a_listing_reads_no_payload(tier, clock, monkeypatch):
    tier.publish("program", DIGEST, {"name": "train"}, random.Random(1).randbytes(1_000))
    flip_last = bytearray(path_of(tier).read_bytes())
    flip_last[-1] ^= 1
    path_of(tier).write_bytes(flip_last)
    os.utime(path_of(tier), (NOW + 5, NOW + 5))
    monkeypatch.setattr("stepcache.storage.disk_store.read_payload", None)
    (info,) = tier.entries()
    assert (info.kind, info.digest, info.header) == ("program", DIGEST, {"name": "train"})
    assert (info.created_time, info.used_time, info.problem) == (NOW, NOW + 5, None)
    assert info.size_bytes == path_of(tier).stat().st_size


@pytest.mark.parametrize("damage", [empty, sign_with_another_key, put_a_directory_there])
def test_a_damaged_entry_is_listed_with_its_problem(tier, damage):
    tier.publish("program", OTHER, {}, b"good")
    tier.publish("program", DIGEST, {}, b"bad")
    damage(path_of(tier), random.Random(1), tier)
    problems = {info.digest: info.problem for info in tier.entries()}
    assert problems[OTHER] is None and problems[DIGEST]
    assert os.path.lexists(path_of(tier)) and not tier.quarantined, "a listing changes nothing"


def test_files_that_are_no_entries_are_left_alone(tier):
    tier.publish("program", DIGEST, {}, b"x")
    stray = [path_of(tier).parent / ".nfs0123", path_of(tier).parent.parent / "README"]
    for path in stray:
        path.write_text("x")
    assert [info.digest for info in tier.entries()] == [DIGEST] and tier.clear() == 1
    assert all(path.exists() for path in stray)


def test_verify_reads_everything_and_sets_aside_what_is_bad(tier):
    for number in range(4):
        tier.publish("program", f"{number:02x}", {}, bytes(1_000))
    for digest in ("01", "02"):
        path = path_of(tier, digest)
        path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    problems = {info.digest: info.problem for info in tier.entries(whole=True)}
    assert [digest for digest in sorted(problems) if problems[digest]] == ["01", "02"]
    assert {refused.digest for refused in tier.quarantined} == {"01", "02"}
    assert {info.digest for info in tier.entries()} == {"00", "03"}


# Load markers


def ended_process():
    """A process of this host that is no more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return Process.current()._replace(pid=child.pid)


def elsewhere():
    """A process of another host, where this one has none of that number."""
    return ended_process()._replace(host="elsewhere-0")


def leave_marker(tier, process, digest=DIGEST, age_seconds=0):
    path = Path(tier.directory) / "v2" / "loading" / f"program.{digest}.{process}.0badcafe"
    path.write_bytes(b"")
    os.utime(path, (NOW - age_seconds,) * 2)
    return path


def test_a_marker_is_there_while_loading(tier):
    with tier.loading("program", DIGEST) as go_on:
        for digest in (DIGEST, OTHER, OTHER):
            go_on(digest)
            (name,) = inside(tier, "loading")
            assert name.startswith(f"program.{digest}.{os.getpid()}.")
            assert tier.read("program", digest) is None and not tier.quarantined
    assert not inside(tier, "loading")
    with pytest.raises(ZeroDivisionError):
        with tier.loading("program", DIGEST):
            raise ZeroDivisionError
    assert not inside(tier, "loading")


def test_loads_of_one_entry_by_one_process_may_overlap(tier):
    tier.publish("program", DIGEST, {}, b"x")
    first, second = (tier.loading("program", DIGEST) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert len(inside(tier, "loading")) == 1 and tier.read("program", DIGEST)
    second.__exit__(None, None, None)
    assert not inside(tier, "loading") and tier.read("program", DIGEST)


def test_a_child_does_not_take_away_the_marker_of_its_parent(tier, monkeypatch):
    with tier.loading("program", DIGEST):
        with monkeypatch.context() as patch:
            loading = tier.loading("program", OTHER)
            loading.__enter__()
            patch.setattr(os, "getpid", lambda: 1)
            loading.__exit__(None, None, None)
        assert len(inside(tier, "loading")) == 2


def same_number_started_at_another_time():
    return Process.current()._replace(start="1")


LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.mark.parametrize(
    "process", [ended_process, pytest.param(same_number_started_at_another_time, marks=LINUX)]
)
def test_an_entry_that_killed_its_loader_is_refused_once(tier, process):
    tier.publish("program", DIGEST, {}, b"x")
    leave_marker(tier, process())
    other = DiskStore(tier.directory)
    assert tier.read("program", DIGEST) is None
    assert "ended while it was loading it" in refusal(tier)
    assert not inside(tier, "loading") and len(inside(tier, "quarantine")) == 1
    assert other.read("program", DIGEST) is None and not other.quarantined
    assert tier.publish("program", DIGEST, {}, b"x") and tier.read("program", DIGEST)
    assert len(tier.quarantined) == 1


def test_a_new_entry_is_not_blamed_for_the_old(tier):
    tier.publish("program", DIGEST, {}, b"old")
    leave_marker(tier, ended_process())
    tier.publish("program", DIGEST, {}, b"new")
    assert tier.read("program", DIGEST).payload == b"new" and not tier.quarantined


def test_the_marker_of_a_live_process_blames_nobody(tier):
    tier.publish("program", DIGEST, {}, b"x")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process = Process.current()._replace(pid=child.pid, start="0")
        leave_marker(tier, process)
        assert tier.read("program", DIGEST) and not tier.quarantined
    finally:
        child.kill()
        child.wait()
    assert tier.read("program", DIGEST) is None and len(tier.quarantined) == 1


@LINUX
def test_a_zombie_has_ended(tier):
    tier.publish("program", DIGEST, {}, b"x")
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    leave_marker(tier, Process.current()._replace(pid=child.pid, start="0"))
    assert tier.read("program", DIGEST) is None
    child.wait()


@pytest.mark.parametrize(("age_seconds", "is_kept"), [(0, True), (3601, False)])
def test_a_marker_of_another_host_blames_nobody(tier, clock, age_seconds, is_kept):
    tier.publish("program", DIGEST, {}, b"x")
    marker = leave_marker(tier, elsewhere(), age_seconds=age_seconds)
    assert tier.read("program", DIGEST) and not tier.quarantined
    DiskStore(tier.directory, clock=clock)
    assert marker.exists() == is_kept


def test_markers_without_an_entry_go_when_a_tier_is_opened(tier, clock):
    tier.publish("program", DIGEST, {}, b"x")
    process = ended_process()
    kept, gone = leave_marker(tier, process), leave_marker(tier, process, OTHER)
    (kept.parent / "stray").write_bytes(b"")
    DiskStore(tier.directory, clock=clock)
    assert kept.exists() and not gone.exists()


def test_temporary_files_of_others_go_when_a_tier_is_opened(tier, clock):
    tmp = Path(tier.directory) / "v2" / "tmp"
    ages = {
        unique_name(): (0, True),
        f"{ended_process()}.0badcafe": (0, False),
        f"{elsewhere()}.0badcafe": (3599, True),
        f"{elsewhere()}.1badcafe": (3601, False),
        "stray": (3601, False),
    }
    for name, (age_seconds, _) in ages.items():
        (tmp / name).write_bytes(b"x")
        os.utime(tmp / name, (NOW - age_seconds,) * 2)
    DiskStore(tier.directory, clock=clock)
    assert inside(tier, "tmp") == sorted(name for name, (_, kept) in ages.items() if kept)


def test_processes_tell_apart():
    process = Process.current()
    assert Process.parse(str(process)) == process and process.is_local()
    assert not process.has_ended() and ended_process().has_ended()
    for text in ("", "x", "1.2", "x.1.host", "1.2.3.4"):
        assert Process.parse(text) is None
    for text in ("9" * 5000 + ".1.host", "1.\ud800.host", "1.2.a host", "1.2.host\n3.4.host"):
        assert Process.parse(text) is None
    assert Process(10**30, "0", process.host).has_ended()


# Other processes. They are forked from one that has imported all, but never used JAX.

PRELUDE = """
import json, os, random, signal, sys, time, traceback, warnings
from pathlib import Path
from stepcache.storage.disk_store import DiskStore
warnings.simplefilter("ignore")
import logging; logging.disable()
directory = Path(sys.argv[1])

def payload_of(text):
    return random.Random(text).randbytes(40_000)

def in_child(work, *arguments):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid

def outcome(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(body, directory, *arguments, timeout=120):
    code = PRELUDE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_at_any_line_of_a_publish(directory):
    """The old entry or the new one is whole, and nothing is left over."""
    body = """
    from stepcache.storage import private_files
    watched = {each.__code__ for each in (private_files.create, DiskStore._write)}
    lines = 0

    def publish(version, last):
        def trace(frame, event, argument):
            global lines
            lines += event == "line"
            if lines == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        tier = DiskStore(directory)
        sys.settrace(lambda frame, *_: trace if frame.f_code in watched else None)
        tier.publish("program", "ab", {"version": version}, payload_of(version))
        sys.settrace(None)

    publish(0, 0)
    total, current, seen = lines, 0, []
    for version in range(1, total + 1):
        lines = 0
        assert outcome(in_child(publish, version, version)) == -signal.SIGKILL
        left = len(os.listdir(directory / "v2" / "tmp"))
        tier = DiskStore(directory)
        entry = tier.read("program", "ab")
        found = entry.header["version"]
        assert found in (current, version), (found, current, version)
        assert entry.payload == payload_of(found)
        assert not tier.quarantined and not os.listdir(directory / "v2" / "tmp")
        seen.append((found == version, left))
        current = found
    print(json.dumps(seen))
    """
    seen = run(body, directory)
    assert len(seen) > 10 and [False, 1] in seen and [False, 0] in seen
    assert all(left == 0 for is_new, left in seen if is_new)


@pytest.mark.slow
def test_a_loader_that_is_killed_and_a_limit_on_file_sizes(directory):
    """Two stories in one process, for its start costs more than they do."""
    body = """
    import resource
    tier = DiskStore(directory)
    tier.publish("program", "ab", {}, payload_of("ab"))
    tier.publish("program", "cd", {}, payload_of("cd"))

    def load():
        tier = DiskStore(directory)
        with tier.loading("program", "cd") as go_on, tier.loading("program", "ef"):
            go_on("ab")
            assert tier.read("program", "ab")
            with tier.loading("program", "cd"):
                assert tier.read("program", "cd")
            os.kill(os.getpid(), signal.SIGKILL)

    assert outcome(in_child(load)) == -signal.SIGKILL
    tier = DiskStore(directory)
    refused = [tier.read("program", "ab") is None for _ in range(2)]
    reasons = list(tier.quarantined)
    tier.publish("program", "ab", {}, b"anew")
    again = [DiskStore(directory).read("program", "ab").payload.decode(), len(tier.quarantined)]
    healthy = tier.read("program", "cd").payload == payload_of("cd")

    def publish_within_a_limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        tier = DiskStore(directory)
        assert not tier.publish("program", "cd", {}, payload_of("more"))
        assert not tier.writable and not os.listdir(directory / "v2" / "tmp")
        assert tier.read("program", "cd").payload == payload_of("cd")

    limited = outcome(in_child(publish_within_a_limit))
    left = os.listdir(directory / "v2" / "loading")
    print(json.dumps([refused, reasons, again, healthy, limited, left]))
    """
    refused, reasons, again, healthy, limited, left = run(body, directory)
    assert refused == [True, True]
    ((kind, digest, reason),) = reasons
    assert (kind, digest) == ("program", "ab") and "ended while it was loading it" in reason
    assert again == ["anew", 1] and healthy and limited == 0 and left == []


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_eight_processes_at_once(directory, seconds):
    """They open, publish, read, list, evict and discard: nothing is torn, and none is refused."""
    body = """
    until = time.monotonic() + float(sys.argv[2])
    max_bytes = 1_000_000
    digests = [f"{number:04x}" for number in range(60)]

    def work(seed):
        chance, counts = random.Random(seed), {"publish": 0, "hit": 0, "miss": 0}
        tier = DiskStore(directory, max_bytes)  # All eight make the directory and the key.
        while time.monotonic() < until:
            digest, roll = chance.choice(digests), chance.random()
            if roll < 0.4:
                assert tier.publish("program", digest, {"digest": digest}, payload_of(digest))
                counts["publish"] += 1
            elif roll < 0.9:
                with tier.loading("program", digest):
                    entry = tier.read("program", digest)
                    counts["miss" if entry is None else "hit"] += 1
                    if entry is not None:
                        assert entry.payload == payload_of(digest)
                        assert entry.header == {"digest": digest}
            elif roll < 0.92:
                tier.prune(chance.randrange(max_bytes))
            elif roll < 0.95:
                tier.prune(unused_since=time.time() - 1)
            elif roll < 0.98:
                for info in tier.entries(whole=chance.random() < 0.3):
                    assert info.problem is None, info
            else:
                tier = DiskStore(directory, max_bytes)
            assert not tier.quarantined, tier.quarantined
        (directory.parent / f"counts.{seed}").write_text(json.dumps(counts))

    workers = [in_child(work, seed) for seed in range(8)]
    codes = [outcome(pid) for pid in workers]
    assert codes == [0] * 8, codes
    tier = DiskStore(directory, max_bytes)
    assert tier.publish("program", "ab", {}, b"the last")
    assert tier.size_bytes() <= max_bytes
    for info in tier.entries(whole=True):
        assert info.problem is None
    left = [os.listdir(directory / "v2" / name) for name in ("tmp", "loading", "quarantine")]
    assert left == [[], [], []], left
    each = [json.loads(path.read_text()) for path in directory.parent.glob("counts.*")]
    print(json.dumps({name: sum(counts[name] for counts in each) for name in each[0]}))
    """
    counts = run(body, directory, seconds, timeout=seconds + 100)
    assert min(counts.values()) > 20, counts


def test_a_small_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    private_files.replace_file(tmp_path / "file", "before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            private_files.replace_file(tmp_path / "file", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"
