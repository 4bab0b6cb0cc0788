"""Where a shared cache is, who may write to it, and the key that its entries are signed with."""

from __future__ import annotations

import hmac
import os
import re
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

from stepcache.errors import CacheDirectoryError, OptionError
from stepcache.link.processes import unique_name
from stepcache.storage import private_files

KEY_FILE, MODE, SECONDS = "STEPCACHE_KEY_FILE", "STEPCACHE_REMOTE_MODE", "STEPCACHE_REMOTE_SECONDS"
_URL = re.compile(r"(s3|gs)://[^/?#]+(/[^?#]*)?|file:///[^?#]+")
_WAIT_SECONDS = 2.0
_USE = ("the shared cache", "name another directory in STEPCACHE_REMOTE")  # For errors.


@dataclass(frozen=True, slots=True)
class Place:
    """A shared cache."""

    url: str  # Of the object store or directory, without a slash at its end.
    directory: Path | None  # The one that the URL names.
    writable: bool  # Whether anything is to be written.
    wait_seconds: float  # How long the calls of a process may wait for the store, in sum.
    key: bytes = field(repr=False)  # Signs the entries.

    @classmethod
    def of(cls, url: str, where: str) -> Place:
        """The place that a URL names, which an option or variable, `where`, has given.

        Raises `OptionError` if the URL, or a variable of the environment, makes no sense, and
        `CacheDirectoryError` if there is no key that can be trusted.
        """
        text = str(url).rstrip("/")
        if not _URL.fullmatch(text):
            raise OptionError(
                "This is not the place of a shared cache",
                where=where,
                expected="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, file:///DIRECTORY or off",
                got=repr(url),
            )
        mode, seconds = os.environ.get(MODE, "") or "write", os.environ.get(SECONDS, "")
        if mode not in ("write", "read"):
            what = "unknown mode of a shared cache"
            raise OptionError(what, where=MODE, expected="write or read", got=mode)
        try:
            wait_seconds = float(seconds or _WAIT_SECONDS)
        except ValueError:
            raise OptionError("not a number of seconds", where=SECONDS, got=seconds) from None
        directory, writable = None, mode == "write"
        if text.startswith("file:"):
            directory = Path(urllib.parse.unquote(urllib.parse.urlsplit(text).path))
        return cls(text, directory, writable, wait_seconds, _key(text, where, directory, writable))


def _key(url: str, where: str, directory: Path | None, writable: bool) -> bytes:
    """The key of `STEPCACHE_KEY_FILE`, or one that is kept in a directory of the user's own."""
    file = os.environ.get(KEY_FILE, "")
    if file:
        secret = private_files.secret_in(Path(file).expanduser(), KEY_FILE)
        return hmac.digest(secret, b"shared cache of stepcache", "sha256")
    if directory is None:
        raise CacheDirectoryError(
            "A shared cache needs a key: loading programs runs code; the key proves who made them",
            where=f"{where}={url}",
            hint=f"set {KEY_FILE} on all machines: openssl rand -hex 32 > KEY && chmod 600 KEY",
        )
    path = directory / "key"
    try:
        if writable:
            private_files.make_directory(directory, *_USE)
            return private_files.ensure_key(path, directory / unique_name())
        private_files.check_directory(directory, *_USE)
        key = private_files.load_key(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise CacheDirectoryError(f"The shared cache cannot be opened: {why}", where=url) from None
    if key is None:
        hint = f"fill it, or set {KEY_FILE}"
        raise CacheDirectoryError("The shared cache holds no key", where=url, hint=hint)
    return key
