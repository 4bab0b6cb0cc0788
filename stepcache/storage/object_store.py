"""Object stores: named bytes in a bucket, or in a directory, that many machines share.

The client is obstore, imported when a store is first asked: tensorstore and s3fs take ten times as
long to import, and it can write only where nothing is. Its asynchronous functions are not used: a
process that ends after one aborts, every second time. So `Requests` runs in threads, for which a
process does not wait.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from stepcache.storage.shared_place import Place

_RETRIES = 3
# Of an object of any size; who waits for it waits no longer than it wants to.
_CLIENT = {"connect_timeout": "2s", "read_timeout": "20s", "timeout": "10min"}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

T = TypeVar("T")


class Requests:
    """Runs requests in daemon threads. They stay, as Python starts none any more when it ends."""

    def __init__(self, name: str, threads: int):
        self._name, self._to_start = name, threads
        self._changed = threading.Condition()
        self._waiting = collections.deque[tuple[Future[Any], Callable[[], Any]]]()
        self._busy, self._stopped = 0, False

    def submit(self, work: Callable[[], T], *, first: bool = False) -> Future[T]:
        """Runs `work`, before all others that wait if it is to be `first`."""
        future: Future[T] = Future()
        with self._changed:
            if self._stopped:
                future.cancel()
                return future
            (self._waiting.appendleft if first else self._waiting.append)((future, work))
            with contextlib.suppress(RuntimeError):  # Too many threads.
                while self._to_start:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                    self._to_start -= 1
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if not self._waiting:
                    return
                future, work = self._waiting.popleft()
                future.set_running_or_notify_cancel()
                self._busy += 1
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del future, work  # What was written may be large, and this thread waits for more.
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> int:
        """Waits until all have run, but not for longer. Returns how many have not."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._busy), seconds)
            return len(self._waiting) + self._busy

    def stop(self) -> None:
        """Drops the requests that have not begun, and takes no more."""
        with self._changed:
            self._stopped = True
            while self._waiting:
                self._waiting.popleft()[0].cancel()
            self._changed.notify_all()


class Object(NamedTuple):
    """An object as a listing shows it."""

    name: str  # Below the URL of the store.
    size_bytes: int
    time: float  # When it was written, in seconds since the epoch.


class ObjectStore:
    """Named bytes below a URL.

    Its exceptions: `FileNotFoundError`, `PermissionError` where a write is refused, and those of
    obstore.
    """

    def __init__(self, place: Place):
        self._place = place

    @functools.cached_property
    def _client(self) -> Any:
        from obstore.store import LocalStore, from_url

        if self._place.directory is not None:
            return LocalStore(self._place.directory, mkdir=self._place.writable)
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
        wait = {"init_backoff": timedelta(seconds=0.05), "max_backoff": timedelta(seconds=1)}
        retries: Any = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=30)}
        retries["backoff"] = {**wait, "base": 2}
        client: Any = _CLIENT | {"allow_http": endpoint.startswith("http:")}
        return from_url(self._place.url, client_options=client, retry_config=retries)

    def get(self, name: str) -> bytes:
        """The bytes of a name."""
        return bytes(self._client.get(name).bytes())

    def listed(self, prefix: str) -> list[Object]:
        """What is there below a prefix."""
        found = [each for chunk in self._client.list(prefix) for each in chunk]
        rows = ((each["path"], each["size"], each["last_modified"]) for each in found)
        return [Object(name, size_bytes, time.timestamp()) for name, size_bytes, time in rows]

    def put(self, name: str, data: bytes) -> bool:
        """Writes bytes, whole, if the name is free; else False."""
        from obstore import exceptions

        try:
            try:
                self._client.put(name, data, mode="create", use_multipart=False)
            except exceptions.NotSupportedError:  # What is there has the same meaning.
                self._client.put(name, data, use_multipart=False)
        except exceptions.AlreadyExistsError:
            return False
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionError(in_short(error)) from error
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Removes objects; one that is not there is none to remove."""
        with contextlib.suppress(FileNotFoundError):
            self._client.delete(list(names))


def in_short(error: BaseException | None) -> str:
    """What an error says, without the answers that it quotes."""
    return (str(error).splitlines() or [""])[0].partition(": <")[0][:300]
