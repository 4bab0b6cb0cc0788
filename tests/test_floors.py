"""The house: imports point to a lower floor only, and private JAX stays in one room."""

import ast
import functools
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "stepcache"

# Longest prefix wins. A file that stands on no floor fails the test.
FLOORS = {
    "_changes": 0,
    "_process_hooks": 0,
    "errors": 0,
    "events": 0,
    "origin": 0,
    "units": 0,
    "weak_objects": 0,
    "jaxcompat": 1,
    "link": 3,
    "sharding": 2,
    "storage": 3,
    "variables": 4,
    "pods": 4,
    "calls": 5,
    "programs": 6,
    "dispatcher": 7,
    "resident": 6,
    "engine": 7,
    "serving": 7,
    "remote": 7,
    "report": 8,
    "session": 9,
    "deployment": 9,
    "install": 9,
    "step": 9,
    "run_command": 8,
    "cli": 9,
    "modules": 9,
    "nnx": 9,
    "equinox": 9,
    "_site": 10,
    "__init__": 10,
    "__main__": 10,
}
# Lines of `.py` that each wing has at most, of the files and folders that its name lists. Longest
# prefix wins. A wing that is to become smaller yet may have what it had, and not a line more.
SIZES = {
    "__init__ __main__ install run_command _site step session": 1_106,
    "deployment cli modules nnx equinox": 2_557,
    "report": 2_254,
    "engine dispatcher": 600,
    "serving remote": 10_356,
    "programs": 3_020,
    "calls": 2_197,
    "variables resident": 3_094,  # With checkpoints 3,894; at most 3,900.
    "variables.checkpoints variables.checkpoint_steps variables.restoring": 800,
    "pods programs.together": 1_300,
    "storage": 1_800,
    "link": 900,
    "jaxcompat": 1_750,
    "sharding": 273,
    "_process_hooks": 150,
    "errors events units origin weak_objects _changes": 900,
}
# Rooms of one floor that must not know each other at all.
STRANGERS = [("programs", "variables")]
PRIVATE_ROOM = "jaxcompat"
PRIVATE_NAMES = "stepcache.jaxcompat.private"  # Hands on JAX's private modules.


@functools.cache
def rooms() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def wing(room: str) -> str:
    return room.split(".")[0]


def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, wherever in the file, by its full name."""
    return _imports_of(path.read_text(encoding="utf-8"))


@functools.cache
def _imports_of(source: str) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{node.module} is imported by a relative name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return frozenset(found)


def room_of(name: str) -> str | None:
    """The room that a name stands in: of a package, the file nearest to it."""
    around = [room for room in rooms() if name == room or name.startswith(f"{room}.")]
    return max(around, key=len, default=None)


def own_imports(path: Path) -> set[str]:
    names = {name.removeprefix("stepcache.") for name in imports(path) if "stepcache." in name}
    return {room for name in names if (room := room_of(name))}


@pytest.mark.parametrize("room", rooms())
def test_imports_point_downwards(room):
    assert wing(room) in FLOORS, f"{room} stands on no floor: give it one"
    for other in own_imports(rooms()[room]):
        higher = FLOORS[wing(other)] > FLOORS[wing(room)]
        assert not higher, f"{room} (floor {FLOORS[wing(room)]}) imports {other}, above it"
        for pair in STRANGERS:
            assert {wing(room), wing(other)} != set(pair), f"{room} imports {other}"


def test_no_cycles():
    graph = {room: own_imports(path) - {room} for room, path in rooms().items()}
    done: set[str] = set()

    def visit(room: str, above: tuple[str, ...]) -> None:
        assert room not in above, f"import cycle: {' → '.join((*above, room))}"
        if room not in done:
            for other in sorted(graph[room]):
                visit(other, (*above, room))
            done.add(room)

    for room in graph:
        visit(room, ())


@pytest.mark.parametrize("room", rooms())
def test_private_jax_stays_in_one_room(room):
    private = [
        name
        for name in imports(rooms()[room])
        if name.startswith(("jax._src", "jaxlib", "jax.experimental", "jax.extend", PRIVATE_NAMES))
    ]
    assert wing(room) == PRIVATE_ROOM or not private, f"{room} imports {private}"


def wing_of_size(room: str) -> str | None:
    """The wing among `SIZES` that a file counts for."""
    parts = room.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        found = [names for names in SIZES if prefix in names.split()]
        if found:
            return found[0]
    return None


@pytest.mark.parametrize("names", SIZES)
def test_no_wing_is_over_its_size(names):
    lines = {
        room: len(path.read_text(encoding="utf-8").splitlines())
        for room, path in rooms().items()
        if wing_of_size(room) == names
    }
    total, limit = sum(lines.values()), SIZES[names]
    largest = sorted(lines, key=lambda room: -lines[room])[:4]
    assert lines, f"no file is in {names}: take it out of the table"
    assert total <= limit, (
        f"{names}: {total:,} lines, {total - limit:,} more than its {limit:,}; the largest files "
        f"are {', '.join(f'{room} ({lines[room]})' for room in largest)}"
    )


def test_each_file_counts_for_a_wing():
    assert [room for room in rooms() if wing_of_size(room) is None] == []
    assert (
        wing_of_size("programs.together") == wing_of_size("pods.watch") == "pods programs.together"
    )
    assert wing_of_size("programs.cache") == wing_of_size("programs") == "programs"


def test_the_test_itself_sees_imports(tmp_path):
    file = tmp_path / "file.py"
    file.write_text("def f():\n    from stepcache.engine import Engine\n    import jax._src.core\n")
    assert own_imports(file) == {"engine"}
    assert "jax._src.core" in imports(file)
    file.write_text("from stepcache.jaxcompat.private import PRIVATE_API\n")
    assert own_imports(file) == {"jaxcompat.private"}
    file.write_text("from stepcache.jaxcompat import PRIVATE_API\n")
    assert own_imports(file) == {"jaxcompat"}


def test_import_is_light():
    """Importing stepcache starts no backend, and imports nothing large that few steps use."""
    import subprocess

    code = (
        "import stepcache; from jax._src import xla_bridge; "
        "assert not xla_bridge.backends_are_initialized(); "
        "import sys; assert not {'flax', 'equinox', 'optax', 'rich', 'zmq'} & set(sys.modules); "
        "parts = 'variables.packing pods.watch report.explanation calls.padding'.split(); "
        "assert not {f'stepcache.{part}' for part in parts} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
