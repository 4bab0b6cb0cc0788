"""Calls whose result is another in each run, or that read what cannot be checked again.

A program that took such a result into its trace is valid for that run only. Names are those under
which the functions are known: `time.time`, `os.listdir`.
"""

from __future__ import annotations

_MODULES = {
    "time": "the clock",
    "random": "random numbers",
    "_random": "random numbers",
    "secrets": "random numbers",
    "uuid": "random numbers",
    "numpy.random": "random numbers",
    "socket": "the network",
    "_socket": "the network",
    "urllib.request": "the network",
    "http.client": "the network",
    "requests": "the network",
    "subprocess": "another process",
    "_posixsubprocess": "another process",
    "multiprocessing": "another process",
    "platform": "the machine",
    "getpass": "the machine",
    "locale": "the locale of the process",
    "signal": "the process",
    "linecache": "lines of files that may have been read before",
    "tempfile": "the file system",
    "glob": "the file system",
    "shutil": "the file system",
    "concurrent.futures": "other threads, which are not watched",
    "runpy": "code that is not known beforehand",
    "inspect": "the source or the frames of running code",
    "gc": "the objects of this process",
    "ctypes": "foreign code",
    "sqlite3": "a database",
    "resource": "the machine",
    "pdb": "a debugger",
    "ipdb": "a debugger",
    "debugpy": "a debugger",
}
_FUNCTIONS = {
    "datetime.datetime.now": "the clock",
    "datetime.datetime.utcnow": "the clock",
    "datetime.datetime.today": "the clock",
    "datetime.date.today": "the clock",
    "datetime.datetime.fromtimestamp": "the time zone of the process",
    "datetime.date.fromtimestamp": "the time zone of the process",
    "datetime.datetime.timestamp": "the time zone of the process",
    "datetime.datetime.astimezone": "the time zone of the process",
    "contextlib.chdir": "the directory of the process",
    "contextvars.copy_context": "all context variables",
    "_contextvars.copy_context": "all context variables",
    "threading.get_ident": "the thread",
    "threading.get_native_id": "the thread",
    "threading.current_thread": "the thread",
    "_thread.get_ident": "the thread",
    "_thread.get_native_id": "the thread",
    "sys._getframe": "the frames of running code",
    "sys.getrefcount": "the objects of this process",
    "importlib.import_module": "a module whose name is not known beforehand",
    "importlib.reload": "a module that changes",
    "builtins.__import__": "a module whose name is not known beforehand",
    "builtins.eval": "code that is not known beforehand",
    "builtins.exec": "code that is not known beforehand",
    "builtins.compile": "code that is not known beforehand",
    "builtins.id": "where this process keeps its objects",
    "builtins.hash": "the hash seed of this process",
    "builtins.input": "what the user types",
    "builtins.breakpoint": "a debugger",
    "_thread.start_new_thread": "another thread, which is not watched",
    "_thread.start_joinable_thread": "another thread, which is not watched",
    "threading.Thread": "another thread, which is not watched",
    "_io.FileIO": "a file that is opened out of sight",
    "pkgutil.resolve_name": "a module whose name is not known beforehand",
    "sys.getrecursionlimit": "the process",
    "sys.get_int_max_str_digits": "the process",
    "sys.getswitchinterval": "the process",
    "jax.process_index": "the rank of the process",
    "jax.host_id": "the rank of the process",
    "jax.local_devices": "the rank of the process",
    "jax._src.xla_bridge.process_index": "the rank of the process",
    "jax._src.xla_bridge.host_id": "the rank of the process",
    "jax._src.xla_bridge.local_devices": "the rank of the process",
    "sys.gettrace": "the process",
}
_OS_PURE = frozenset(
    "environ getenv environb getenvb fspath path sep linesep name fsencode fsdecode PathLike "
    "curdir pardir extsep altsep pathsep devnull error strerror".split()
)
_PATH_IMPURE = frozenset(
    "exists lexists isfile isdir islink ismount getmtime getatime getctime getsize samefile "
    "realpath abspath expanduser expandvars".split()
)
_TIME_PURE = frozenset(("sleep", "struct_time"))
_RANDOM_PURE = frozenset(("Random", "Generator", "RandomState", "SeedSequence"))
_INSPECT_PURE = frozenset(
    ("signature", "Parameter", "Signature", "isclass", "isfunction", "ismethod")
)


def why_impure(name: str) -> str | None:
    """What the result of a call of this name depends on that cannot be checked, or None."""
    what = _FUNCTIONS.get(name) or _by_module(name)
    return f"it calls {name}, which depends on {what}" if what else None


def _by_module(name: str) -> str | None:
    module = name.rpartition(".")[0]
    head = name.split(".")
    if head[0] in ("os", "posix", "nt", "posixpath", "genericpath", "ntpath"):
        return _in_os(head)
    if head[0] == "time" and head[-1] in _TIME_PURE:
        return None
    if head[-1] in _RANDOM_PURE or (head[0] == "inspect" and head[-1] in _INSPECT_PURE):
        return None
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
