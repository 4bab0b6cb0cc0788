"""Calls whose result is another in each run, or that read what cannot be checked again.

A program that took such a result into its trace is valid for that run only. Names are those under
which the functions are known: `time.time`, `os.listdir`.
"""

from __future__ import annotations

import functools
from types import CodeType

from stepcache.fingerprint.known_packages import COMPILED_OF_MUJOCO

NUMPYS_NOW = "numpy.datetime64('now')"


def _by_name(named: dict[str, str]) -> dict[str, str]:
    return {name: what for what, names in named.items() for name in names.split()}


_MODULES = _by_name(
    {
        "the clock": "time",
        "random numbers": "random _random secrets uuid _uuid numpy.random",
        "the network": "socket _socket urllib.request http.client requests",
        "another process": "subprocess _posixsubprocess multiprocessing",
        "other threads, which are not watched": "concurrent.futures",
        "the machine": "platform getpass resource",
        "the process": "signal",
        "the locale of the process": "locale",
        "lines of files that may have been read before": "linecache",
        "the file system": "tempfile glob shutil mimetypes",
        "a database": "sqlite3",
        "code that is not known beforehand": "runpy",
        "the source or the frames of running code": "inspect",
        "the objects of this process": "gc",
        "foreign code": "ctypes",
        "what its compiled code reads": " ".join(COMPILED_OF_MUJOCO),
        "a debugger": "pdb ipdb debugpy",
    }
)
_FUNCTIONS = _by_name(
    {
        "the clock": "datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today "
        f"datetime.date.today {NUMPYS_NOW}",
        "random numbers": "os.urandom posix.urandom os.getrandom posix.getrandom",
        "the time zone of the process": "datetime.datetime.fromtimestamp "
        "datetime.date.fromtimestamp datetime.datetime.timestamp datetime.datetime.astimezone",
        "the directory of the process": "contextlib.chdir",
        "all context variables": "contextvars.copy_context _contextvars.copy_context",
        "the thread": "threading.get_ident threading.get_native_id threading.current_thread "
        "_thread.get_ident _thread.get_native_id",
        "another thread, which is not watched": "_thread.start_new_thread "
        "_thread.start_joinable_thread threading.Thread",
        "the frames of running code": "sys._getframe",
        "the objects of this process": "sys.getrefcount",
        "a module whose name is not known beforehand": "importlib.import_module "
        "builtins.__import__ pkgutil.resolve_name pydoc.locate",
        "a module that changes": "importlib.reload",
        "which modules can be found": "importlib.util.find_spec pkgutil.find_loader "
        "pkgutil.get_loader pkgutil.iter_modules pkgutil.walk_packages",
        "objects whose classes are not known beforehand": "pickle.load pickle.loads _pickle.load "
        "_pickle.loads",
        "code that is not known beforehand": "builtins.eval builtins.exec builtins.compile",
        "the overloads that exist": "typing.get_overloads",
        "which names levels of logging have": "logging.getLevelName logging.getLevelNamesMapping",
        "which prefixes are registered": "xml.etree.ElementTree.tostring "
        "xml.etree.ElementTree.tostringlist",
        "where this process keeps its objects": "builtins.id",
        "the hash seed of this process": "builtins.hash",
        "what the user types": "builtins.input",
        "a debugger": "builtins.breakpoint",
        "a file that is opened out of sight": "_io.FileIO",
        "the process": "sys.getrecursionlimit sys.get_int_max_str_digits sys.getswitchinterval "
        "sys.gettrace",
        "the rank of the process": "jax.process_index jax.host_id jax.local_devices "
        "jax._src.xla_bridge.process_index jax._src.xla_bridge.host_id "
        "jax._src.xla_bridge.local_devices",
    }
)
_OS_PURE = frozenset(
    "environ getenv environb getenvb fspath path sep linesep name fsencode fsdecode PathLike "
    "curdir pardir extsep altsep pathsep devnull error strerror "
    "_path_normpath _path_splitroot _path_splitroot_ex".split()
)
_PATH_IMPURE = frozenset(
    "exists lexists isfile isdir islink ismount getmtime getatime getctime getsize samefile "
    "realpath abspath expanduser expandvars".split()
)
_TIME_PURE = frozenset(("sleep", "struct_time"))
# What they give follows from their seeds; without one they ask the system, which a recording sees.
_RANDOM_PURE = frozenset(
    "Random Generator RandomState SeedSequence default_rng MT19937 PCG64 PCG64DXSM Philox "
    "SFC64".split()
)
_INSPECT_PURE = frozenset(
    "signature getfullargspec Parameter Signature isclass isfunction ismethod ismodule "
    "isbuiltin isgeneratorfunction iscoroutinefunction".split()
)


@functools.lru_cache(maxsize=4096)
def why_impure(name: str) -> str | None:
    """What the result of a call of this name depends on that cannot be checked, or None."""
    what = _FUNCTIONS.get(name) or _by_module(name)
    return f"it calls {name}, which depends on {what}" if what else None


def asks_numpy_for_now(code: CodeType) -> bool:
    """Whether code may ask numpy for the time."""
    return "datetime64" in code.co_names and not {"now", "today"}.isdisjoint(code.co_consts)


def name_of_method(cls: type, name: str) -> str:
    """The full name of a method of a class: that in the class which it has inherited it from."""
    owner = inherited_from(cls, name)
    return f"{owner.__module__}.{owner.__qualname__}.{name}"


def inherited_from(cls: type, name: str) -> type:
    """The class that defines a method of a class."""
    return next((each for each in cls.__mro__ if name in vars(each)), cls)


def _by_module(name: str) -> str | None:
    module = name.rpartition(".")[0]
    head = name.split(".")
    if head[0] in ("os", "posix", "nt", "posixpath", "genericpath", "ntpath"):
        return _in_os(head)
    if head[0] == "time" and head[-1] in _TIME_PURE:
        return None
    if head[-1] in _RANDOM_PURE:
        return None
    if head[0] == "inspect" and not _INSPECT_PURE.isdisjoint(head[1:2]):
        return None  # Also `inspect.Parameter.empty`.
    while module:
        if module in _MODULES:
            return _MODULES[module]
        module = module.rpartition(".")[0]
    return None


def _in_os(parts: list[str]) -> str | None:
    what = "the file system or the process"
    if parts[0] in ("posixpath", "genericpath", "ntpath") or parts[1:2] == ["path"]:
        return what if parts[-1] in _PATH_IMPURE else None
    return None if len(parts) < 2 or parts[1] in _OS_PURE else what
