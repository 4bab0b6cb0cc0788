"""A directory that only its user can change, the key stored in it, and how to list it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from stepcache.errors import CacheDirectoryError, refuse_url
from stepcache.storage.entry import KEY_BYTES

_ATTEMPTS = 3
_CACHE, _ELSEWHERE = "the program cache", "name another directory in STEPCACHE_DIR"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def default_directory() -> Path | None:
    """The user's own cache directory; None for none. Raises as `absolute`, or without a home."""
    asked = os.environ.get("STEPCACHE_DIR", "")
    if asked.lower() == "off":
        return None
    if asked:
        return absolute(asked, "STEPCACHE_DIR")
    import platformdirs  # Takes long, and is not needed where STEPCACHE_DIR is set.

    try:
        return absolute(platformdirs.user_cache_path("stepcache"), "the user's cache directory")
    except RuntimeError:
        what = "This user has no home directory"
        raise CacheDirectoryError(what, hint="name a directory in STEPCACHE_DIR") from None


def absolute(directory: str | os.PathLike, where: str) -> Path:
    """A directory as a user names it, for a process that may change its own directory.

    Raises `CacheDirectoryError` if it is a URL, in the home of an unknown user, or relative to a
    directory that was removed.
    """
    refuse_url(directory, CacheDirectoryError, where)
    try:
        return Path(os.path.abspath(Path(directory).expanduser()))
    except RuntimeError:
        what = "No such user"
    except FileNotFoundError:
        what = "The current directory was removed"
    raise CacheDirectoryError(what, where=where, got=os.fsdecode(directory))


def make_directory(path: Path, of: str = _CACHE, elsewhere: str = _ELSEWHERE) -> None:
    """Makes a directory for this user alone, its missing parents too, or checks the one there is.

    Errors say what it is the directory `of`, and what to do if it cannot be used.

    Raises `CacheDirectoryError` if another user can change it, `OSError` if it cannot be made.
    """
    missing = [path]
    while not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        # Not more for the parents: under a loose umask the check below would refuse them.
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
    check_directory(path, of, elsewhere)


def check_directory(path: Path, of: str = _CACHE, elsewhere: str = _ELSEWHERE) -> None:
    """Checks that a directory belongs to this user, and that no other can write to it.

    What is stored there is run, so whoever can write there can run code as this user. A symbolic
    link is judged by where it leads.

    Raises `CacheDirectoryError` if not, `OSError` if the directory is not there.
    """
    found = path.stat()
    what, expected, place, mode = "", "mode 0700", path, found.st_mode
    hint = f"chmod 700 {path}, or {elsewhere}"
    if not stat.S_ISDIR(mode):
        what, expected = f"The place of {of} is not a directory", "a directory"
        hint = f"remove it, or {elsewhere}"
    elif found.st_uid != os.geteuid():
        what = f"The directory of {of} belongs to another user, who could put code there"
        expected, hint = f"owner {os.geteuid()}", elsewhere
    elif mode & _WRITABLE_BY_OTHERS:
        what = f"Others can write to the directory of {of}, and so put code there"
    for parent in {path.parent, path.resolve().parent} if not what else ():
        found = parent.stat()
        if found.st_mode & _WRITABLE_BY_OTHERS and not found.st_mode & stat.S_ISVTX:
            what, place = f"Others can put another directory in the place of {of}", parent
            expected = "a parent that only its owner can write to, or one with the sticky bit"
            hint = f"chmod go-w {parent}, or {elsewhere}"
            break
    if what:
        got = f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
        raise CacheDirectoryError(what, where=str(place), expected=expected, got=got, hint=hint)


def load_key(path: Path) -> bytes | None:
    """The key in a file, or None where there is none or it is not one that this user wrote."""
    try:
        with os.fdopen(os.open(path, READ_FLAGS), "rb") as file:
            found, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    except OSError:
        return None
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    is_trusted = is_ours and not found.st_mode & _WRITABLE_BY_OTHERS
    return key if is_trusted and len(key) == KEY_BYTES else None


def secret_in(path: Path, where: str) -> bytes:
    """What a user's file holds that nobody else can read, without white space around it.

    It may be a link, and belong to root where only root's group reads it. Errors say `where` it is
    named. Raises `CacheDirectoryError` if others can read it, or it is too short or missing.
    """
    others, user = stat.S_IRWXG | stat.S_IRWXO, os.geteuid()
    try:
        with path.open("rb") as file:
            found, secret = os.fstat(file.fileno()), file.read(1 << 16).strip()
        if not found.st_uid and user:
            others &= ~stat.S_IRGRP
        what, got = "is too short", f"{len(secret)} bytes"
        if found.st_uid not in (user, 0) or found.st_mode & others:
            what = "can be read by others, who could run code as you"
            got = f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
        elif len(secret) >= KEY_BYTES:
            return secret
    except OSError as error:
        what, got = "cannot be read", str(error.strerror)
    raise CacheDirectoryError(
        f"The key of the shared cache {what}",
        where=f"{where}={path}",
        expected=f"at least {KEY_BYTES} bytes in a file of owner {user}, mode 0600",
        got=got,
        hint=f"chmod 600 {path}; openssl rand -hex 32 makes a key, the same for all machines",
    )


def ensure_key(path: Path, temporary: Path) -> bytes:
    """The key in a file, made where there is none and replaced where it is damaged.

    Several processes may do this at once; all get the same key. `temporary` is a path on the same
    file system that no other process uses. Raises `OSError` if the key cannot be written.
    """
    for _ in range(_ATTEMPTS):
        key = load_key(path)
        if key is not None:
            return key
        try:
            create(temporary, [secrets.token_bytes(KEY_BYTES)])
            try:
                os.link(temporary, path)  # Unlike a rename, it leaves the key of a faster process.
            except OSError:
                if load_key(path) is None:  # Damaged, or there are no hard links.
                    temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
    raise OSError(errno.EIO, "the key cannot be read back", str(path))


def create(path: Path, pieces: Iterable[bytes], time: float | None = None) -> None:
    """Makes a private file, which is on the disk afterwards; `time` is that of its last change."""
    with os.fdopen(os.open(path, CREATE_FLAGS, 0o600), "wb") as file:
        file.writelines(pieces)
        file.flush()
        if time is not None:
            with contextlib.suppress(OSError):  # Some file systems set no times.
                os.utime(file.fileno(), (time, time))
        os.fsync(file.fileno())


def listed(directory: Path) -> list[Path]:
    """What is in a directory; nothing where that cannot be seen."""
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def remove(path: Path) -> bool:
    """Removes a file or directory. Returns whether this call removed it."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        return not os.path.lexists(path)
    return True


def sync(path: Path) -> None:
    """Waits until a file, or what a directory lists, is on the disk."""
    descriptor = os.open(path, READ_FLAGS)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Writes a private file so that all of it is seen or none, also after the machine crashed."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        create(new, [text.encode()])
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync(path.parent)


def write_at(descriptor: int, offset: int, data: memoryview) -> int:
    """Writes bytes at a place in a file. Returns where they end."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        offset, data = offset + written, data[written:]
    return offset
