"""An S3 server in a process of its own, with faults on the way to it.

    python -m tests.object_server PORT

starts moto and, at the port, a proxy to it. `ObjectServer` starts that, and says what the proxy
does.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BUCKET = "programs"
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
}
# moto gives objects to those only who sign, whatever that is.
_WHO = "Credential=testing/20260101/us-east-1/s3/aws4_request"
_HEADERS = {"Authorization": f"AWS4-HMAC-SHA256 {_WHO}"}
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class ObjectServer:
    """An S3 server with a bucket. As a context manager it is ended.

    Attributes:
        environment: the variables by which clients find it.
        fetched: the paths of the objects that were read between the latest two calls of `behave`.
    """

    fetched: list[str]

    def __init__(self):
        self.port = _free_port()
        command = [sys.executable, "-m", "tests.object_server", str(self.port)]
        root = Path(__file__).parent.parent
        self._process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}
        limit = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                self._ask("PUT", f"/{BUCKET}")
                break
            assert time.monotonic() < limit and self._process.poll() is None
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self._process.stdin is not None
        self._process.stdin.close()  # Its only user is gone.
        self._process.wait(20)

    def _ask(self, method, path, body=None):
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, body, _HEADERS, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()

    def behave(self, **faults):
        """From now on, until the next call: see `Faults`. Returns how many requests there were."""
        before = json.loads(self._ask("POST", "/-/faults", json.dumps(faults).encode()))
        self.fetched = before["fetched"]
        return before["requests"]

    def objects(self, prefix=""):
        """The bodies of all objects below a prefix, by name."""
        path = f"/{BUCKET}?list-type=2&max-keys=1000&prefix={prefix}"
        names = re.findall(r"<Key>([^<]*)</Key>", self._ask("GET", path).decode())
        return {name: self._ask("GET", f"/{BUCKET}/{name}") for name in names}

    def put(self, name, body):
        """Writes an object, over one of the same name."""
        from obstore.store import S3Store

        store = S3Store(
            BUCKET,
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id="testing",
            secret_access_key="testing",
            client_options={"allow_http": True},
        )
        store.put(name, body)


@dataclass
class Faults:
    """What the proxy does to requests.

    Attributes:
        latency: seconds before each answer.
        unavailable: so many requests are answered with 503.
        truncated: so many bodies of objects end in the middle.
        hang: no request is answered.
        hang_writes: no write is.
        read_only: writes are answered with 403.
        forbidden: everything is.
        requests: how many there were, by method.
        fetched: the paths of the objects that were read.
    """

    latency: float = 0.0
    unavailable: int = 0
    truncated: int = 0
    hang: bool = False
    hang_writes: bool = False
    read_only: bool = False
    forbidden: bool = False
    requests: dict[str, int] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults, behind, lock = Faults(), 0, threading.Lock()

    def log_message(self, *_):
        pass

    def _handle(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/-/faults":
            with self.lock:
                before, type(self).faults = self.faults, Faults(**json.loads(body))
            return self._answer(200, json.dumps(vars(before)).encode())
        faults, write = self.faults, self.command in ("PUT", "POST", "DELETE")
        with self.lock:
            faults.requests[self.command] = faults.requests.get(self.command, 0) + 1
            if self.command == "GET" and "?" not in self.path:
                faults.fetched.append(self.path)
            unavailable, faults.unavailable = faults.unavailable > 0, faults.unavailable - 1
        if faults.hang or (faults.hang_writes and write):
            time.sleep(3600)
        time.sleep(faults.latency)
        if unavailable:
            return self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
        if faults.forbidden or (faults.read_only and write):
            return self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        connection = _connections.__dict__.get("one")
        if connection is None:
            connection = _connections.one = http.client.HTTPConnection("127.0.0.1", self.behind)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        with self.lock:
            cut = self.command == "GET" and "?" not in self.path and faults.truncated > 0
            faults.truncated -= cut
        self._answer(answer.status, data, answer.getheaders(), cut)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _answer(self, status, data, headers=(), cut=False):
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut


_connections = threading.local()


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main():
    from moto.server import ThreadedMotoServer

    os.environ.update(KEYS)
    _Proxy.behind = _free_port()
    ThreadedMotoServer("127.0.0.1", _Proxy.behind, verbose=False).start()
    server = _Server(("127.0.0.1", int(sys.argv[1])), _Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # Ends when whoever started it does.
    os._exit(0)


if __name__ == "__main__":
    main()
