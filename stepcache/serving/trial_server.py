"""A server of served variables for trials: what a running one holds must not be written."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stepcache.errors import VariablesError

_START_SECONDS = 60.0


@contextlib.contextmanager
def own_server(like: str) -> Iterator[str]:
    """Context manager of a server of the same engine as another one; gives its address.

    The server ends with this process, however that ends. `VariablesError` if it does not start.
    """
    engine = like.partition(":")[0]
    with tempfile.TemporaryDirectory(prefix="stepcache-") as directory:
        command = [sys.executable, "-m", "stepcache", "serve", "--variables", directory]
        command += ["--until-input-ends"]
        place, environment = directory, os.environ | {"JAX_PLATFORMS": "cpu"}
        if engine == "ray":
            import ray

            place = Path(directory).name
            command += ["--ray", place]
            environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert process.stdout is not None
            ready = select.select([process.stdout], [], [], _START_SECONDS)[0]
            if not ready or not process.stdout.readline():
                raise VariablesError("a server to measure does not start", where=" ".join(command))
            yield f"{engine}:{place}"
        finally:
            process.terminate()
            try:
                process.wait(_START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
