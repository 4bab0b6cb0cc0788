"""Tables of committed results: all that a benchmark measured, and one row of each beside others."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


class Result:
    """A committed result.

    Args:
        name: of the benchmark.
        number: which one, in order of their jax: the first is of Python 3.11.
    """

    def __init__(self, name: str, number: int = 0):
        record = json.loads(sorted(RESULTS.glob(f"{name}-*.json"))[number].read_text())
        self.name, self.figures, self.settings = name, record["figures"], record["settings"]
        self.device, self.rows = record["device"], record["rows"]
        self.versions = f"Python {record['python'].rpartition('.')[0]}, jax {record['jax']}"
        self.by_name = {(row["case"], row.get("contender")): row for row in self.rows}

    def ratio(self, case: str, contender: str) -> str:
        """Returns `0.61 × (0.60 … 0.63)`; an empty string if this was not measured."""
        row = self.by_name.get((case, contender))
        return "{ratio:.2f} × ({ratio_low:.2f} … {ratio_high:.2f})".format(**row) if row else ""

    def source(self, options: str = "", how: str = "medians and quartiles") -> str:
        """Returns the sentence that says what was measured, and how to measure it again."""
        command = f"python -m benchmarks.{self.name}{options}"
        rounds = self.settings["rounds"]
        return f"{self.device}, {self.versions}; {how} of {rounds} rounds. `{command}`"


result = functools.cache(Result)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Returns a table in Markdown. All columns but the first ones are figures."""
    marks = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, marks, *rows)) + "\n"


def in_units(seconds: float) -> str:
    """Returns `1.2 s`, `34.5 ms` or `6.7 µs`."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:,.{2 if unit == 's' else 1}f} {unit}"
    raise AssertionError


# ---- all of a benchmark ------------------------------------------------------------------------


# Starts that were measured on a GPU when programs were loaded without a trace.
_OUTDATED = (("accelerator", ", cold"), ("accelerator", ", warm"))


def every(name: str) -> str:
    """All cases and contenders of a benchmark, by each Python that it was measured with."""
    results = [result(name, number) for number in range(len(list(RESULTS.glob(f"{name}-*.json"))))]
    rows, peers = [], set()
    for case, contender in results[0].by_name:
        if any(name == of and case.endswith(end) for of, end in _OUTDATED):
            continue
        cells = ["" if case in peers else case, contender or ""]
        for found in results:
            row = found.by_name.get((case, contender))
            cells.append(in_units(row["median_seconds"]) if row else "")
            cells.append(found.ratio(case, contender or "") if case in peers else "")
        peers.add(case)
        rows.append(cells)
    columns = (each for found in results for each in (found.versions, "ratio"))
    return table(("case", "contender", *columns), rows, 2) + f"\n{results[0].source()}\n"


def every_protocol() -> str:
    """What the processes of a pod ask of its coordination service."""
    found = result("pod_protocol")
    by_name = {(row["case"], row["ranks"]): row for row in found.rows}
    rows = []
    for ranks in dict.fromkeys(ranks for _, ranks in by_name):
        key, built, barrier, quiet, late, never, lost = (
            by_name[case, ranks] for case in _CASES_OF_A_POD
        )
        rows.append(
            (
                f"{ranks:,}",
                f"{key['mean_calls']:.1f}",
                f"{key['mean_bytes']:,.0f}",
                in_units(key["service_cpu_seconds"]),
                in_units(key["seconds"]),
                f"{built['mean_calls']:.1f}",
                in_units(barrier["service_cpu_seconds"]),
                f"{quiet['mean_calls']:.0f}",
                f"{late['mean_calls']:.1f}",
                f"{never['seconds'] - 7:.1f} s",
                f"{lost['seconds'] - 3:.1f} s",
            )
        )
    header = (
        *("ranks", "a new key, calls a rank", "bytes a rank", "CPU of rank 0", "time"),
        *("built by one, calls", "JAX's barrier, CPU of rank 0", "quiet for 30 s, calls"),
        *("one late, calls", "never comes: error after the limit", "one killed: error on all"),
    )
    return table(header, rows, 0) + f"\n{found.source(how='medians')}\n"


def many_tasks() -> str:
    """What a start of a step costs with many light tasks."""
    found = result("remote")
    rows = [
        (
            f"{each['tasks']:,}",
            f"{each['client_messages']}",
            f"{each['client_bytes']}",
            *(
                in_units(each[name])
                for name in ("seconds", "client_seconds", "coordinator_seconds")
            ),
        )
        for each in found.figures["tasks"]
    ]
    header = (
        *("tasks", "messages of the client", "bytes", "time"),
        *("CPU of the client", "CPU of the coordinator"),
    )
    about = f"{found.device}, {found.versions}; means of 200 starts."
    return table(header, rows, 0) + f"\n{about} `python -m benchmarks.remote`\n"


_CASES_OF_A_POD = (
    *("stored", "built by one", "a barrier of JAX's", "quiet", "late", "never comes", "lost"),
)
_WHOLE = (
    *("dispatch", "restart", "small_steps", "remote_cache", "padding", "resident"),
    *("modules", "pod_start", "pod_calls", "served", "remote", "accelerator"),
)
EVERY: dict[str, Callable[[], str]] = {
    f"every {name}": functools.partial(every, name)
    for name in _WHOLE
    if list(RESULTS.glob(f"{name}-*.json"))
} | {"every pod_protocol": every_protocol, "many tasks": many_tasks}


# ---- one row of each ---------------------------------------------------------------------------

_JIT, _NNX = ("`jax.jit`", "jax.jit"), ("`nnx.jit`", "nnx.jit")
_FIRST = ("`jax.jit`", "jax.jit, nothing stored")
_CACHE = ("JAX's own cache", "jax.jit, persistent cache")
_FIRST_OF_OURS = (_FIRST, "stepcache, nothing stored")
_CACHE_OF_OURS = (_CACHE, "stepcache, second start")
_RESIDENT = "stepcache, resident"
_SESSION = ("TF 1's session callable", "TF 1 session callable")
_SERVER = ("TF's parameter server", "TensorFlow, parameter server")
_PUSHED = "a worker reads 16 MB from a server, and pushes as much"
# What it is, the benchmark, its case, who else does it, and which contender is ours.
_ROWS = (
    ("a call that hits, 100 leaves", "dispatch", "100 leaves", _JIT, "stepcache"),
    (
        *("a call over a module of 1,000 variables", "modules", "nnx null step, 1000 variables"),
        *(_NNX, "stepcache.nnx"),
    ),
    (
        *("the next start, 12 layers", "small_steps", "12 layers, warm"),
        *_CACHE_OF_OURS,
    ),
    (
        *("the next start, 40 small functions", "small_steps", "40 functions, warm"),
        *_CACHE_OF_OURS,
    ),
    (
        *("the first start of all, 40 small functions", "small_steps", "40 functions, cold"),
        *_FIRST_OF_OURS,
    ),
    (
        *("the first start of all, 12 layers", "small_steps", "12 layers, cold"),
        *_FIRST_OF_OURS,
    ),
    (
        *("a step whose moments are on the host", "resident", "moments on the host, 12 layers"),
        *(("copies by hand", "copies by hand"), "stepcache, OnHost"),
    ),
    ("a step is started on another process", "remote", "a null step", _SESSION, "on one task"),
    (_PUSHED, "served", "16 MB, 1 worker", _SERVER, "stepcache, local"),
    ("the same, over Ray", "served", "16 MB, 1 worker", _SERVER, "stepcache, ray"),
    ("the same by an actor of Ray alone", "served", "16 MB, 1 worker", _SERVER, "Ray, an actor"),
)


_ON_A_GPU = (
    ("a call that hits, 100 leaves", "100 leaves", _JIT, "stepcache"),
    ("a training step, its state in `Variables`", "training step, 12 layers", _JIT, _RESIDENT),
    (
        *("a step whose moments are on the host", "moments on the host, 12 layers"),
        *(("copies by hand", "copies by hand"), "stepcache, OnHost"),
    ),
    (
        *("512 MiB from the host to the device", "512 MiB to one device"),
        *(("`device_put` of numpy", "jax.device_put of numpy"), "a read"),
    ),
    (
        *("the same, beside `device_put` of pinned memory", "512 MiB to one device"),
        *(("`device_put`", "jax.device_put of pinned"), "a read"),
    ),
)


def _beside(found: Result, what: str, case: str, peer: tuple[str, str], ours: str) -> list[str]:
    """A row: what it is, beside whom, how long they take, and our ratio to that."""
    shown, name = peer
    theirs = found.by_name[case, name]
    seconds = theirs["median_seconds"]
    ratio = found.ratio(case, ours)
    if theirs["ratio"] != 1:  # They are not the first contender either.
        ratio = f"{found.by_name[case, ours]['median_seconds'] / seconds:.2f} ×"
    return [what, shown, in_units(seconds), ratio]


def beside_others() -> str:
    """stepcache beside what else there is: one row of each benchmark."""
    measured = [row for row in _ROWS if list(RESULTS.glob(f"{row[1]}-*.json"))]
    rows = [(*_beside(result(name), what, *rest), f"`{name}`") for what, name, *rest in measured]
    header = ("", "beside", "which takes", "stepcache", "`python -m benchmarks.` …")
    return table(header, rows, 2) + f"\n{result('dispatch').versions}, CPU, two cores.\n"


def on_a_gpu() -> str:
    """The same on one GPU."""
    found = result("accelerator")
    header = (f"on one {found.device.partition(' ×')[0]}", "beside", "which takes", "stepcache")
    rows = [_beside(found, *row) for row in _ON_A_GPU]
    about = f"{found.versions}; medians and quartiles of {found.settings['call_rounds']} rounds."
    return table(header, rows, 2) + f"\n{about} `python -m benchmarks.accelerator`\n"
