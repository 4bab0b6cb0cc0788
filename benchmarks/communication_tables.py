"""Tables, sentences and the picture of `benchmarks.communication`, from its committed result.

python -m benchmarks.communication_tables       # draws docs/communication.png anew
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_tables import RESULTS, result, table

PICTURE = Path(__file__).parent.parent / "docs" / "communication.png"
HOST, DEVICE, SERVER = "host ↔ device", "device ↔ device", "server ↔ process"
SAME_TIME = "loss_after_same_time"
BASE, CACHED = "read at each step", "cache until changed"
MODELS = {"characters": "the language model", "recommender": "the recommender"}
Record = dict[str, Any]


def _runs(**what: str) -> list[Record]:
    """The records of some cases, those with the base policy first, in the order of bytes."""
    rows = [row for row in result("communication").figures["runs"] if what.items() <= row.items()]
    return sorted(rows, key=lambda row: (row["policy"] != BASE, -_bytes(row), row["policy"]))


def _bytes(row: Record) -> float:
    return sum(row["bytes_a_step"].values())


def _run(group: str, place: str, model: str, policy: str) -> Record:
    (row,) = _runs(group=group, place=place, model=model, policy=policy)
    return row


def _kilobytes(row: Record, link: str) -> str:
    return f"{row['bytes_a_step'].get(link, 0) / 1e3:,.1f}"


def _spread(values: Sequence[float], digits: int = 3, factor: float = 1) -> str:
    low, middle, high = (each * factor for each in values)
    return f"{middle:.{digits}f} ({low:.{digits}f} … {high:.{digits}f})"


def _source() -> str:
    found = result("communication")
    count = found.settings["rounds"]
    return (
        f"{found.device}, two cores, {found.versions}; medians and quartiles of {count} "
        f"seed{'s' * (count > 1)}. `python -m benchmarks.communication`"
    )


def _compared(rows: Iterable[Record], links: dict[str, str], text_columns: int = 2) -> str:
    """A table of policies: bytes over each link, time of a step, and losses."""
    cells, before = [], None
    for row in rows:
        cells.append(
            (
                MODELS[row["model"]] if row["model"] != before else "",
                row["policy"],
                *(_kilobytes(row, link) for link in links),
                _spread(row["step_seconds"], 1, 1e3),
                _spread(row["loss"]),
                *([_spread(row[SAME_TIME])] if SAME_TIME in row else ()),
            )
        )
        before = row["model"]
    header = ("model", "policy", *links.values(), "ms a step", "loss, same steps")
    header += ("loss, same time",) if len(cells[0]) > len(header) else ()
    return table(header, cells, text_columns)


def _steps(name: str = "steps") -> str:
    return f"{result('communication').settings[name]} steps"


def one_process() -> str:
    """Each policy in one process."""
    place = {"group": "one process", "place": "4 devices"}
    rows = [row for model in MODELS for row in _runs(model=model, **place)]
    links = {HOST: "kB a step, host", DEVICE: "kB, between devices"}
    return _compared(rows, links) + f"\n4 devices, {_steps()}. {_source()}\n"


def meshes() -> str:
    """A few policies on each number of devices."""
    cells = []
    for count in (1, 2, 4, 8):
        for policy in (BASE, "cache, every=4", "replicated", "sharded"):
            row = _run("one process", f"{count} devices", "characters", policy)
            cells.append(
                (
                    str(count) if policy == BASE else "",
                    policy,
                    _kilobytes(row, HOST),
                    _kilobytes(row, DEVICE),
                    _spread(row["step_seconds"], 1, 1e3),
                )
            )
    header = ("devices", "policy", "kB a step, host", "kB, between devices", "ms a step")
    return table(header, cells, 2) + f"\nThe language model. {_source()}\n"


def readers() -> str:
    """What a session sees that only reads."""
    rows = [row for model in MODELS for row in _runs(group="another session reads", model=model)]
    links = {HOST: "kB a step, host", DEVICE: "kB, between devices"}
    every = result("communication").settings["publish_every"]
    about = f"4 devices; of {_steps()} every {every}th writes. The loss is what the reader saw."
    return _compared(rows, links) + f"\n{about} {_source()}\n"


def workers() -> str:
    """Each policy in two worker processes."""
    place = {"group": "workers", "place": "local, 2 workers"}
    rows = [row for model in MODELS for row in _runs(model=model, **place)]
    about = f"2 workers, the local engine, {_steps('worker_steps')} of both together."
    return _compared(rows, {SERVER: "kB a step, server"}) + f"\n{about} {_source()}\n"


def engines() -> str:
    """A few policies by each engine, and number of workers."""
    cells = []
    for engine in ("local", "ray"):
        for count in ("1 worker", "2 workers", "4 workers"):
            for policy in (BASE, "max_staleness=16, every=16"):
                of_models = [
                    _run("workers", f"{engine}, {count}", model, policy) for model in MODELS
                ]
                first = policy == BASE
                cells.append(
                    (
                        f"{engine}, {count}" if first else "",
                        policy,
                        *(
                            cell
                            for row in of_models
                            for cell in (
                                _kilobytes(row, SERVER),
                                _spread(row["step_seconds"], 1, 1e3),
                            )
                        ),
                    )
                )
    columns = (f"{name}, {what}" for name in MODELS for what in ("kB a step", "ms"))
    return table(("", "policy", *columns), cells, 2) + f"\n{_source()}\n"


# ---- clones ------------------------------------------------------------------------------------


def _clones(**what: Any) -> Record | None:
    rows = result("communication").figures["clones"]["rows"]
    return next((row for row in rows if what.items() <= row.items()), None)


_CONTENDERS = {
    "TensorFlow, a resource variable": {"variable": "resource", "caching_device": False},
    "the same, `caching_device`": {"variable": "resource", "caching_device": True},
    "TensorFlow, a reference variable": {"variable": "reference", "caching_device": False},
    "the same, with `caching_device`": {"variable": "reference", "caching_device": True},
    "stepcache, `Read()`": {"contender": "stepcache", "cache": None},
    'stepcache, `Read(cache="device")`': {"contender": "stepcache", "cache": "device"},
}


def clones() -> str:
    """How often a variable crosses to clones, each on a device of its own."""
    cells = []
    for shown, what in _CONTENDERS.items():
        rows = [row for count in (1, 4, 8) if (row := _clones(clones=count, **what))]
        if rows:
            changed = (str(row["changed"]) for row in rows)
            last = rows[-1]
            milliseconds = _spread(sorted(last["seconds"]), 1, 1e3)
            cells.append((shown, *changed, str(last["unchanged"]), milliseconds))
    header = (
        *("times it crosses in a step", "1 clone", "4 clones", "8 clones"),
        *("8 clones, nobody has written", "ms"),
    )
    found = result("communication")
    size, rounds = (found.figures["clones"][name] for name in ("size_bytes", "rounds"))
    about = (
        f"{size / 1e6:.1f} MB, on one machine; one contender after the other. ms: a step that "
        f"follows no write, median and quartiles of {rounds}. {found.versions}. "
        "`python -m benchmarks.communication --tensorflow PYTHON`"
    )
    return table(header, cells) + f"\n{about}\n"


def does_it_cache() -> str:
    """The same in a few sentences."""
    size, found = result("communication").figures["clones"]["size_bytes"] / 1e6, {}
    for shown, what in _CONTENDERS.items():
        row = _clones(clones=8, **what)
        found[shown] = [row[name] * size for name in ("changed", "unchanged")] if row else [0, 0]
    each, cached, _, _, _, ours = found.values()
    row = _clones(clones=8, variable="resource", caching_device=True) or {}
    sees = "is" if row.get("sees_a_write_of_the_same_run") else "is not"
    version = (_clones(caching_device=True) or {"contender": "TensorFlow"})["contender"]
    return (
        f"{version}, a resource variable of {size:.1f} MB and 8 clones: {each[0]:.1f} MB cross in "
        f"a step, {cached[0]:.1f} MB with `caching_device`; in the next step, though nobody has "
        f"written, {cached[1]:.1f} MB again. A write of the same run {sees} seen. "
        f'`Read(cache="device")`: {ours[0]:.1f} MB, then {ours[1]:.1f} MB. '
        "`python -m benchmarks.communication --only clones --tensorflow PYTHON`\n"
    )


# ---- sentences ---------------------------------------------------------------------------------


def where_it_is() -> str:
    """What a step moves, by where its variables are."""
    place = ("one process", "4 devices", "characters")
    host, cached, replicated = (
        _bytes(_run(*place, policy)) / 1e6 for policy in (BASE, "cache, every=4", "replicated")
    )
    return (
        f"The language model on 4 devices: a step moves {host:.1f} MB with its variables on the "
        f"host, {cached:.1f} MB if copies serve 4 steps between writes, and "
        f"{replicated:.1f} MB with them on the devices. "
        "`python -m benchmarks.communication --only mesh`\n"
    )


def when_it_is_invalid() -> str:
    """What a reader saves, and sees."""
    place = ("another session reads", "4 devices", "characters")
    always, cached = (_bytes(_run(*place, policy)) / 1e6 for policy in (BASE, CACHED))
    return (
        f"A session that reads at each step, while another one writes at every "
        f"{result('communication').settings['publish_every']}th: {always:.2f} MB a step read anew, "
        f"{cached:.2f} MB from copies that are dropped when they are invalid, with the same losses "
        "to the bit. `python -m benchmarks.communication --only reader`\n"
    )


def best_way() -> str:
    """For each model, the policies on the edge: none moves less and learns as much."""
    lines = []
    for model, shown in MODELS.items():
        rows = _runs(group="workers", place="local, 2 workers", model=model)
        base, best = rows[0], []

        def share(row: Record, base: Record = base) -> float:
            return row["bytes_a_step"][SERVER] / base["bytes_a_step"][SERVER]

        for row in sorted(rows, key=share):
            if share(row) < 1 and all(row["loss"][1] < other["loss"][1] for other in best):
                best.append(row)
        edge = "; ".join(
            f"`{row['policy']}` {share(row):.2f} of the bytes, losses {row['loss'][1]:.2f} and "
            f"{row[SAME_TIME][1]:.2f}"
            for row in best
        )
        losses = f"{base['loss'][1]:.2f} after the same steps, {base[SAME_TIME][1]:.2f} after"
        lines.append(f"- {shown}: the base has a loss of {losses} the same time; {edge}.")
    command = "`python -m benchmarks.communication --only worker`"
    return "\n".join(lines) + f"\n\nTwo workers. {command}\n"


# ---- the picture -------------------------------------------------------------------------------


_COLORS = {"max_staleness": "C0", "every": "C1", "cache, every": "C2"}
_DASHES = {"1": ":", "4": "--"}


def _style(policy: str) -> dict[str, str]:
    """A color for each kind of policy; the more it saves, the fuller the line."""
    kind, _, number = policy.rpartition("=")
    if "staleness" in kind and "every" in kind:
        return {"color": "C3", "linestyle": _DASHES.get(number, "-")}
    plain = {BASE: "black", CACHED: "gray"}.get(policy)
    return {"color": plain or _COLORS[kind], "linestyle": _DASHES.get(number, "-")}


def draw(path: Path = PICTURE) -> None:
    """Draws losses by bytes and by time: two workers, each model in a row."""
    from matplotlib import figure, ticker

    axes = (drawn := figure.Figure((11, 8), layout="constrained")).subplots(2, 2)
    for (by_bytes, by_time), (model, shown) in zip(axes, MODELS.items(), strict=True):
        rows = _runs(group="workers", place="local, 2 workers", model=model)
        for row in sorted(rows, key=lambda row: row["policy"]):
            seconds, moved, losses = zip(*row["curve"], strict=True)
            megabytes, style = [size / 1e6 for size in moved], _style(row["policy"])
            by_bytes.plot(megabytes, losses, label=row["policy"], **style)
            by_time.plot(seconds, losses, **style)
        by_bytes.set(xscale="log", xlabel="MB to and from the server", ylabel=f"loss of {shown}")
        by_time.set(xlabel="seconds")
        by_bytes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        by_bytes.xaxis.set_major_formatter("{x:g}")
        by_bytes.xaxis.set_minor_locator(ticker.NullLocator())
    lines, names = axes[0, 0].get_legend_handles_labels()
    drawn.legend(lines, names, loc="outside lower center", ncols=5, fontsize=9)
    drawn.savefig(path, dpi=90)


BLOCKS: dict[str, Callable[[], str]] = {
    f"communication {name}": made
    for name, made in {
        "one process": one_process,
        "meshes": meshes,
        "readers": readers,
        "workers": workers,
        "engines": engines,
        "clones": clones,
        "does it cache": does_it_cache,
        "where it is": where_it_is,
        "when it is invalid": when_it_is_invalid,
        "best way": best_way,
    }.items()
}

if __name__ == "__main__":
    draw()
    print(f"written to {PICTURE}, from {RESULTS}")
