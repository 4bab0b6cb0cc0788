"""Object stores: named bytes in a bucket, or in a directory, that many machines share.

The client is obstore, imported when a store is first asked: tensorstore and s3fs take ten times as
long to import. It writes only where nothing is, and has errors of their own for what is refused.
Its asynchronous functions are not used: a process that ends after one aborts, every second time. So
requests run in threads, which a process does not wait for.

What the bytes mean is known to `shared_entries.py`, where the store is to `shared_place.py`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from stepcache.storage.shared_place import Place

_READERS, _WRITERS = 16, 4
_IDLE_SECONDS = 1.0
_RETRIES = 3
# Of an object of any size; who waits for it waits no longer than it wants to.
_CLIENT = {"connect_timeout": "2s", "read_timeout": "20s", "timeout": "10min"}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

T = TypeVar("T")


class Object(NamedTuple):
    """An object as a listing shows it."""

    name: str  # Below the URL of the store.
    size_bytes: int
    time: float  # When it was written, in seconds since the epoch.


class Requests:
    """Runs requests in so many threads at most, which are there while there are requests."""

    def __init__(self, name: str, threads: int):
        self._name, self._limit = name, threads
        self._changed = threading.Condition()
        self._waiting = collections.deque[tuple[Future[Any], Callable[[], Any]]]()
        self._threads = self._idle = self._running = self._lasting = 0
        self._stopped = False

    def submit(self, work: Callable[[], T], *, first: bool = False) -> Future[T]:
        """Runs `work`, before all others that wait if it is to be `first`."""
        future: Future[T] = Future()
        with self._changed:
            if self._stopped:
                future.cancel()
                return future
            (self._waiting.appendleft if first else self._waiting.append)((future, work))
            if len(self._waiting) <= self._idle:
                self._changed.notify()
            elif self._threads < self._limit:
                self._start()
        return future

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        with contextlib.suppress(RuntimeError):  # Too many threads, or Python is about to end.
            thread.start()
            self._threads += 1

    def stay(self) -> None:
        """Keeps a thread from now on: when Python ends, none can be started any more."""
        with self._changed:
            self._lasting = 1
            if not self._threads and not self._stopped:
                self._start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopped:
                    self._idle += 1
                    told = self._changed.wait(_IDLE_SECONDS)
                    self._idle -= 1
                    if not told and self._threads > self._lasting:
                        break
                if not self._waiting:
                    self._threads -= 1
                    return
                future, work = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                self._running += 1
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del future, work  # What was written may be large, and this thread waits for more.
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def hurry(self, future: Future[Any]) -> None:
        """Has a request run before all others that wait."""
        with self._changed:
            for each in self._waiting:
                if each[0] is future:
                    self._waiting.remove(each)
                    self._waiting.appendleft(each)
                    return

    def wait(self, seconds: float | None = None) -> int:
        """Waits until all have run, but not for longer. Returns how many have not."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._running), seconds)
            return len(self._waiting) + self._running

    def stop(self) -> None:
        """Drops the requests that have not begun, and takes no more."""
        with self._changed:
            self._stopped = True
            while self._waiting:
                self._waiting.popleft()[0].cancel()
            self._changed.notify_all()


class ObjectStore:
    """Named bytes below a URL. Every request runs in a thread, and gives a future.

    Its exceptions: `FileNotFoundError`, `PermissionError` where the store refuses, else `OSError`.
    """

    def __init__(self, place: Place):
        self._place = place
        self.reads = Requests("stepcache get", _READERS)
        self.writes = Requests("stepcache put", _WRITERS)
        self._opening = threading.Lock()
        self._client: Any = None

    def get(
        self, name: str, then: Callable[[bytes], T] = lambda data: data, *, first: bool = False
    ) -> Future[T]:
        """The bytes of a name, or what `then` makes of them in the thread."""
        return self._read(lambda client: bytes(client.get(name).bytes()), then, first)

    def listed(self, prefix: str, then: Callable[[list[Object]], T]) -> Future[T]:
        """What is there below a prefix, or what `then` makes of it in the thread."""

        def read(client: Any) -> list[Object]:
            return [_object(each) for chunk in client.list(prefix) for each in chunk]

        return self._read(read, then, first=True)

    def _read(self, read: Callable[[Any], Any], then: Callable[[Any], T], first: bool) -> Future[T]:
        def work() -> T:
            with self._errors() as client:
                data = read(client)
            return then(data)

        return self.reads.submit(work, first=first)

    def put(self, name: str, make: Callable[[], bytes]) -> Future[bool]:
        """Writes what `make` gives, whole, if the name is free; else False."""

        def work() -> bool:
            from obstore import exceptions

            data = make()
            with self._errors() as client:
                try:
                    client.put(name, data, mode="create", use_multipart=False)
                except exceptions.AlreadyExistsError:
                    return False
                except exceptions.NotSupportedError:  # What is there has the same meaning.
                    client.put(name, data, use_multipart=False)
            return True

        return self.writes.submit(work)

    def delete(self, names: Sequence[str]) -> Future[None]:
        """Removes objects; one that is not there is none to remove."""

        def work() -> None:
            with self._errors() as client, contextlib.suppress(FileNotFoundError):
                client.delete(list(names))

        return self.writes.submit(work)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[Any]:
        """Gives the client, and raises its exceptions as those of Python."""
        try:
            import obstore.exceptions as known
        except ImportError as error:
            raise OSError(f"obstore cannot be imported: {error}") from error
        try:
            yield self._open()
        except FileNotFoundError as error:
            raise FileNotFoundError(_in_short(error)) from error
        except (known.PermissionDeniedError, known.UnauthenticatedError) as error:
            raise PermissionError(_in_short(error)) from error
        except (known.BaseError, ValueError) as error:
            raise OSError(_in_short(error)) from error

    def _open(self) -> Any:
        with self._opening:
            if self._client is None:
                self._client = self._opened()
            return self._client

    def _opened(self) -> Any:
        from obstore.store import LocalStore, from_url

        if self._place.directory is not None:
            return LocalStore(self._place.directory, mkdir=self._place.writable)
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
        wait = {"init_backoff": timedelta(seconds=0.05), "max_backoff": timedelta(seconds=1)}
        options: dict[str, Any] = {
            "client_options": _CLIENT | {"allow_http": endpoint.startswith("http:")},
            "retry_config": {
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=30),
                "backoff": wait | {"base": 2},
            },
        }
        return from_url(self._place.url, **options)


def _object(found: Any) -> Object:
    return Object(found["path"], found["size"], found["last_modified"].timestamp())


def _in_short(error: Exception) -> str:
    """What the client says, without the answers that it quotes."""
    return (str(error).splitlines() or [""])[0].partition(": <")[0][:300]
