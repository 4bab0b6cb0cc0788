"""Where a piece of code comes from: the user's own files, an installed distribution, or Python.

An installed distribution stands for its code by name and version; the user's own code stands for
itself. An editable install is the user's own code: its version says nothing about its content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import itertools
import os
import re
import stat
import sys
import sysconfig
from pathlib import Path
from types import CodeType
from typing import Any

from stepcache import errors
from stepcache.fingerprint.tokens import digest

USER, INSTALLED, PYTHON = "user", "installed", "python"

_OWN_PACKAGE = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
_SITE_NAMES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LIBRARIES = tuple(
    {
        place + os.sep
        for name in ("stdlib", "platstdlib")
        if (path := sysconfig.get_paths().get(name))
        for place in (path, os.path.realpath(path))
    }
)


@functools.lru_cache(maxsize=8192)
def origin_of_file(filename: str) -> str:
    """`USER`, `INSTALLED` or `PYTHON`. Code without a file, as of a notebook, is the user's."""
    if any(site in filename for site in _SITE_NAMES) or filename.startswith(_OWN_PACKAGE):
        return INSTALLED
    if filename.startswith("<frozen ") or filename.startswith(_LIBRARIES):
        return PYTHON
    return USER


@functools.lru_cache(maxsize=8192)
def package_of(filename: str) -> str:
    """The top package of an installed file; of stepcache's own, wherever that is."""
    if filename.startswith(_OWN_PACKAGE):
        return "stepcache"
    site = next((name for name in _SITE_NAMES if name in filename), None)
    return filename.partition(site)[2].partition(os.sep)[0] if site else ""


def origin_of_module(name: str | None) -> str:
    """The origin of a module by its name, loaded or not."""
    if not name:
        return USER
    module = sys.modules.get(name)
    filename = getattr(module, "__file__", None)
    if filename:
        return origin_of_file(filename)
    if module is not None and name == "__main__":
        return USER
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return PYTHON
    if module is not None and hasattr(module, "__path__"):  # A namespace package.
        paths = list(module.__path__)
        return origin_of_file(paths[0] + os.sep) if paths else USER
    if top != name and top in sys.modules:
        return origin_of_module(top)
    if module is None:
        return _origin_if_imported(name)
    is_made_by_hand = getattr(module, "__spec__", None) is None  # And not an extension's.
    return USER if is_made_by_hand else INSTALLED


@functools.lru_cache(maxsize=1024)
def _origin_if_imported(name: str) -> str:
    path, places = _found(name)
    path = path or (f"{places[0]}{os.sep}" if places else None)  # A namespace package has no file.
    return origin_of_file(path) if path else USER


def origin_of(value: Any) -> str:
    """The origin of a function or a class."""
    # Of a class its metaclass may be asked, which may raise.
    code = None if issubclass(type(value), type) else getattr(value, "__code__", None)
    if isinstance(code, CodeType) and not code.co_filename.startswith("<"):
        return origin_of_file(code.co_filename)
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        module = None  # Of a class of proxies it is a property.
    return origin_of_module(module) if module or code is None else USER


def is_generated(function: Any) -> bool:
    """Whether `dataclasses` or attrs have generated a function."""
    code = getattr(function, "__code__", None)
    return code is not None and (
        function is vars(dataclasses).get("_replace")  # The `__replace__` of Python 3.13.
        or code.co_filename.startswith("<attrs generated ")
        or (code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__"))
    )


@functools.lru_cache(maxsize=1024)
def distribution_of(module: str) -> tuple[str, str]:
    """What stands for the package of a module: its name, and the version that was installed.

    A package that no distribution contains, as one that was copied to where others are, stands for
    itself by the content of its files. The version is empty where it has none, or very many.
    """
    top = module.partition(".")[0]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return top, _version_of(importlib.metadata.distribution(top))
    if top == "stepcache":  # From a checkout. Its version says as little there as that of others.
        return top, sys.modules[top].__version__
    versions = {f"{found.name} {_version_of(found)}" for found in _distributions_with(top)}
    return top, ", ".join(sorted(versions)) or _content_of_package(top)


def _distributions_with(package: str) -> list[importlib.metadata.Distribution]:
    """The distributions that contain a package. Python's map of all packages takes 0.2 s."""
    found = []
    for each in importlib.metadata.distributions():
        tops = each.read_text("top_level.txt")
        if tops is not None:
            is_there = package in tops.split()
        else:
            files = "\n" + (each.read_text("RECORD") or "")
            is_there = f"\n{package}/" in files or f"\n{package}." in files
        if is_there:
            found.append(each)
    return found


def _content_of_package(package: str) -> str:
    """A digest of all files of a package; empty where there are none, or too many to read."""
    module = sys.modules.get(package)
    places = [Path(each) for each in getattr(module, "__path__", None) or ()]
    inside = (
        (number, path.relative_to(place), path)
        for number, place in enumerate(places)
        for path in place.rglob("*")
        if "__pycache__" not in path.parts and path.is_file()
    )
    files = sorted(itertools.islice(inside, _MOST_FILES + 1))
    if not places and getattr(module, "__file__", None):
        files = [(0, Path(), Path(module.__file__))]  # type: ignore[union-attr, arg-type]
    size_bytes = sum(path.stat().st_size for _, _, path in files)
    if not 0 < len(files) <= _MOST_FILES or size_bytes > _MOST_BYTES:
        return ""
    return f"files {digest(f'{n} {name} {file_digest(str(path))}' for n, name, path in files)}"


_MOST_FILES, _MOST_BYTES = 1000, 64 << 20


def _version_of(found: importlib.metadata.Distribution) -> str:
    # To have the whole of the metadata parsed as a message takes milliseconds.
    written = _VERSION.search(found.read_text("METADATA") or "")
    return written[1] if written else found.version


_VERSION = re.compile(r"^Version: *(\S+) *$", re.MULTILINE)


def file_of_module(name: str) -> str | None:
    """The file that a module was, or would be, imported from; None where it is not found.

    Imports nothing, not even the packages that the module is in.
    """
    return _found(name)[0]


def _found(name: str) -> tuple[str | None, list[str]]:
    """The file of a module, and where modules inside it would be."""
    path: str | None = None
    places: list[str] = []
    parts = name.split(".")
    for number, part in enumerate(parts, start=1):
        module = sys.modules.get(".".join(parts[:number]))
        if module is not None:
            path = getattr(module, "__file__", None)
            places = list(getattr(module, "__path__", None) or ())
        elif number > 1:
            path, places = _find_in(places, part)
        else:
            try:
                spec = importlib.machinery.PathFinder.find_spec(part)
            except Exception:  # A third-party finder.
                spec = None
            if spec is None:
                return None, []
            path, places = spec.origin, list(spec.submodule_search_locations or ())
    return path, places


def _find_in(places: list[str], name: str) -> tuple[str | None, list[str]]:
    """The file of a module in a package, and where modules inside it would be."""
    spaces = []
    for place in places:
        inside = os.path.join(place, name)  # noqa: PTH118  (many, on the way to a first call)
        if os.path.isfile(initial := os.path.join(inside, "__init__.py")):  # noqa: PTH113, PTH118
            return initial, [inside]
        for suffix in importlib.machinery.all_suffixes():
            if os.path.isfile(inside + suffix):  # noqa: PTH113
                return inside + suffix, []
        if os.path.isdir(inside):  # noqa: PTH112
            spaces.append(inside)
    return None, spaces


def file_label(filename: str, module: str | None) -> str:
    """How to name a file, whatever directory the checkout is in: `package/model.py`."""
    if filename.startswith("<") or "ipykernel" in filename:
        return "<cell>" if module in (None, "__main__") else module.replace(".", "/") + ".py"
    path = Path(filename)
    depth = 1
    if module and module != "__main__":
        depth = module.count(".") + (2 if path.name == "__init__.py" else 1)
    return "/".join(path.parts[-depth:])


def state_of_file(path: str) -> tuple[int, ...] | None:
    """Size, inode and both times of change: equal where a file was not written to since.

    None where there is no file, or something else.
    """
    try:
        status = os.stat(path)  # noqa: PTH116  (many, on the way to a first call)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


_digests: dict[str, tuple[tuple[int, ...], str]] = {}


def file_digest(path: str) -> str:
    """A digest of a file's content; "absent" where it cannot be read.

    A file that was not written to since is not read again.
    """
    state = state_of_file(path)
    known = _digests.get(path)
    if known is not None and known[0] == state:
        return known[1]
    try:
        if state is None:
            return "absent"
        with Path(path).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return "absent"
    _digests[path] = (state, content)
    return content
