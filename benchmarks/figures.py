"""Writes the figures of the pages: each block of figures is made from a committed result.

    python -m benchmarks.figures            # writes them anew into docs/ and README.md
    python -m benchmarks.figures --check    # says which differ

A block stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`. What makes it is the
function of that name in `BLOCKS`. Each ends with the command that measures it again.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import communication_tables
from benchmarks.result_tables import EVERY, beside_others, on_a_gpu, result, table

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"(?P<begin><!-- figures: (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end of figures -->)", re.S
)


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.1f}"


# ---- programs ----------------------------------------------------------------------------------


def hit() -> str:
    """What a call costs that finds its program."""
    found, peers = result("dispatch"), ("stepcache", "equinox.filter_jit", "nnx.jit")
    rows = [
        (
            case,
            f"{found.by_name[case, 'jax.jit']['median_seconds'] * 1e6:,.1f}",
            *(found.ratio(case, peer) for peer in peers),
        )
        for case in ("1 leaf", "100 leaves", "1,000 leaves")
    ]
    header = ("a step over", "`jax.jit`, µs a call", "stepcache", "`eqx.filter_jit`", "`nnx.jit`")
    return table(header, rows) + f"\n{found.source()}\n"


def restart() -> str:
    """What the first call of a start costs."""
    found = result("restart")
    both = "stepcache", "stepcache, trusted"
    ours = [f"{each}{when}" for each in both for when in ("", ", defined first")]
    rows = [
        (
            case,
            f"{found.by_name[case, 'jax.jit, persistent cache']['median_seconds']:.1f}",
            *(found.ratio(case, each) for each in ours),
        )
        for case in ("12 layers, 1 device", "24 layers, 1 device")
    ]
    header = (
        *("a training step", "JAX's persistent cache, s", "stepcache", "defined at import"),
        *("trusted", "trusted, defined at import"),
    )
    return table(header, rows) + f"\n{found.source()}\n"


def cold() -> str:
    """What a start costs that finds nothing, and one that finds everything."""
    results = [result("small_steps", number) for number in range(2)]
    cases = {"40 functions": "40 small functions", "12 layers": "a transformer of 12 layers"}
    rows = []
    for case, shown in cases.items():
        for state, words, ours in (
            ("cold", "", "stepcache, nothing stored"),
            ("warm", "", "stepcache, second start"),
            ("warm", ", defined a second before", "stepcache, defined a second before"),
        ):
            ratios = (each.ratio(f"{case}, {state}", ours) for each in results)
            rows.append((f"{shown}, {state}{words}", *ratios))
    header = ("from the first call to the last result", *(each.versions for each in results))
    about = (
        "Ratios of times. Cold: to plain `jax.jit`. Warm: to JAX's persistent cache with all its "
        "thresholds at zero."
    )
    return table(header, rows) + f"\n{about} {results[0].source()}\n"


def shared_cache() -> str:
    """What a start takes whose programs another machine has built."""
    found, rows = result("remote_cache"), []
    contenders = {
        "directory, warm": "the directory of an earlier start",
        "shared, 0 ms": "only a shared cache, on this machine",
        "shared, 20 ms": "only one that answers 20 ms later",
        "shared, 50 ms": "only one that answers 50 ms later",
        "shared, empty, 50 ms": "only one that answers 50 ms later, and is empty",
        "shared, refuses": "only one that refuses connections",
        "shared, hangs": "only one that never answers",
    }
    cases = list(dict.fromkeys(case for case, _ in found.by_name))
    for name, shown in contenders.items():
        cells = []
        for case in cases:
            waits = found.figures[f"{case}: {name}"].get("remote_seconds")
            waited = f"{waits['median']:.2f} s" if name.startswith("shared") else ""
            cells += [found.ratio(case, name), waited]
        rows.append((shown, *cells))
    header = [
        "the start finds",
        *(each for case in cases for each in (case, "waits")),
    ]
    return table(header, rows) + f"\n{found.source()}\n"


def padding() -> str:
    """How many programs batches of any size need."""
    found = result("padding")
    rows = [
        (name, f"{row['median_seconds']:.1f}", str(found.figures[name]["programs"]))
        for (_, name), row in found.by_name.items()
    ]
    header = ("200 batches of 1 to 512 rows", "seconds", "programs")
    return table(header, rows) + f"\n{found.source()}\n"


# ---- variables ---------------------------------------------------------------------------------


def _moved(**what: Any) -> dict[str, Any]:
    figures = result("transfers").figures["moved"]
    (row,) = (row for row in figures if what.items() <= row.items())
    return row


def reads() -> str:
    """What crosses each link while readers on several devices read a variable on the host."""
    policies = {
        "`jax.device_put` to each device, at each call": ("4 calls", "jax.device_put"),
        "`Read()`": ("4 calls", "each call"),
        "`Read()`, the four readers in one step": ("4 arguments", "each call"),
        '`Read(cache="device")`': ("4 calls", "each version"),
    }
    rows = []
    for shown, (readers, read) in policies.items():
        row = _moved(devices=8, readers=readers, read=read)
        links = ("host_link_bytes", "device_link_bytes")
        rows.append((shown, *(_megabytes(row[link]) for link in links)))
    header = ("policy", "MB from the host", "MB between devices")
    row = _moved(devices=8, readers="4 calls", read="each version")
    about = (
        f"{_megabytes(row['lower_bound_bytes'])} MB must cross the host's link: two versions. "
        "Bytes are counted, so they are the same on every machine. "
        "`python -m benchmarks.transfers`"
    )
    return table(header, rows) + f"\n{about}\n"


def saved() -> str:
    """The same in one sentence."""
    every = _moved(devices=8, readers="4 calls", read="jax.device_put")
    best = _moved(devices=8, readers="4 calls", read="each version")
    most, least = (row["host_link_bytes"] for row in (every, best))
    return (
        f"Eight devices, four readers, eight steps, two versions: {_megabytes(least)} MB over the "
        f"host's link instead of {_megabytes(most)} MB, {most / least:.0f} times less. "
        "`python -m benchmarks.transfers`\n"
    )


def read_times() -> str:
    """How long a read makes a step, and plain JAX."""
    found = result("transfers")
    rows = []
    for case in dict.fromkeys(case for case, _ in found.by_name):
        plain = found.ratio(case, "jax.device_put")
        rows.append((case, found.ratio(case, "a read"), plain))
    header = ("devices, the step, size", "`Read()`", "`jax.device_put`")
    about = "Ratios to a step that reads nothing. A step that waits leaves the cores to the copy."
    return table(header, rows) + f"\n{about} {found.source()}\n"


def resident() -> str:
    """What `Variables` cost in a call."""
    found = result("resident")
    rows = []
    for leaves in ("1 leaf", "10 leaves", "100 leaves", "1000 leaves"):
        case = f"null step, {leaves}"
        contenders = ("stepcache, resident", "stepcache, packed", "nnx.jit")
        micros = f"{found.by_name[case, 'jax.jit']['median_seconds'] * 1e6:,.1f}"
        rows.append((leaves, micros, *(found.ratio(case, each) for each in contenders)))
    header = ("a step that carries", "`jax.jit`, µs", "`Variables`", "`pack=True`", "`nnx.jit`")
    return table(header, rows) + f"\n{found.source()}\n"


def served(cases: Sequence[str] = ()) -> str:
    """What reads and writes of a served variable cost."""
    found, rows = result("served"), []
    for case in cases or dict.fromkeys(case for case, _ in found.by_name):
        tensorflow = found.by_name[case, "TensorFlow, parameter server"]["median_seconds"]
        cells = [case, f"{tensorflow * 1e3:.2f}"]
        for engine in ("stepcache, local", "stepcache, ray"):
            row = found.by_name[case, engine]
            cells += [f"{row['median_seconds'] * 1e3:.2f}", found.ratio(case, engine)]
        rows.append(cells)
    header = ("case", "TensorFlow", "stepcache, local", "ratio", "stepcache, ray", "ratio")
    return table(header, rows) + f"\nMilliseconds. {found.source(' --tensorflow PYTHON')}\n"


def served_short() -> str:
    """The same of a few cases."""
    return served(["scalar, 4 workers", "16 MB, 4 workers", "100 MB, 4 workers, large pages"])


def ray_calls() -> str:
    """The same for processes that reach an actor by calls of Ray alone."""
    found, rows = result("served"), []
    contenders = ("stepcache, ray calls", "Ray, an actor", "JAX, no server")
    for case in dict.fromkeys(case for case, name in found.by_name if name == contenders[0]):
        measured = (
            found.by_name.get((case, name))
            for name in ("TensorFlow, parameter server", *contenders)
        )
        times = [f"{row['median_seconds'] * 1e3:.2f}" if row else "" for row in measured]
        cells = *times[:2], found.ratio(case, contenders[0]), *times[2:]
        rows.append((case.replace(", 1 worker", ""), *cells))
    header = ("case, 1 worker", "TensorFlow", contenders[0], "ratio", *contenders[1:])
    return table(header, rows) + f"\nMilliseconds. {found.source(' --tensorflow PYTHON')}\n"


# ---- modules and pods --------------------------------------------------------------------------


def modules() -> str:
    """What steps over modules cost."""
    found, rows = result("modules"), []
    for count in ("1", "10", "100", "1000"):
        nnx = f"nnx null step, {count} variable{'s' * (count != '1')}"
        equinox = f"equinox null step, {count} array{'s' * (count != '1')}"
        rows.append(
            (
                count,
                found.ratio(nnx, "stepcache.nnx"),
                found.ratio(nnx, "nnx.cached_partial"),
                found.ratio(equinox, "stepcache.equinox"),
            )
        )
    header = (
        "arrays",
        "`snnx.step` to `nnx.jit`",
        "`nnx.cached_partial`",
        "`seqx.step` to `filter_jit`",
    )
    return table(header, rows) + f"\n{found.source()}\n"


def pod_start() -> str:
    """What the first step of a pod costs."""
    results = [result("pod_start", number) for number in range(2)]
    contenders = {
        "jax.jit, every process compiles": "every process compiles, `jax.jit`",
        "stepcache, one compiles": "one compiles, stepcache",
        "jax.jit, its cache, warm": "the next start, `jax.jit` with JAX's cache",
        "stepcache, warm": "the next start, stepcache",
    }
    case = "12 layers, 4 processes"
    rows = [
        (
            shown,
            *(
                cell
                for each in results
                for cell in (
                    f"{each.by_name[case, name]['median_seconds']:.1f}",
                    each.ratio(case, name) if name != "jax.jit, every process compiles" else "",
                )
            ),
        )
        for name, shown in contenders.items()
    ]
    columns = (each for found in results for each in (f"{found.versions}, s", "ratio"))
    header = ("a pod's first step", *columns)
    return table(header, rows) + f"\nFour processes on two cores. {results[0].source()}\n"


def agreement() -> str:
    """How long processes take to agree on a program."""
    found = result("pod_start").figures["agreement_seconds"]
    middle, most = (found[name] * 1e3 for name in ("median", "max"))
    return (
        f"To agree takes {middle:.0f} ms in the median, {most:.0f} ms at most, of four processes "
        "on two cores. `python -m benchmarks.pod_start`\n"
    )


BLOCKS: dict[str, Callable[[], str]] = {
    each.__name__.replace("_", " "): each
    for each in (
        hit,
        restart,
        cold,
        shared_cache,
        padding,
        reads,
        saved,
        read_times,
        resident,
        served,
        served_short,
        ray_calls,
        modules,
        pod_start,
        agreement,
    )
}
BLOCKS |= {
    "beside others": beside_others,
    "on a gpu": on_a_gpu,
    **EVERY,
    **communication_tables.BLOCKS,
}


def pages() -> list[Path]:
    """Returns the pages that may have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(page: str) -> str:
    """Returns a page with its blocks of figures made anew."""

    def made(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{BLOCKS[found['name']]()}\n{found['end']}"

    return BLOCK.sub(made, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (now := written(text)) != text:
            stale.append(path.name)
            if not check:
                path.write_text(now, encoding="utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    if check and stale:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
