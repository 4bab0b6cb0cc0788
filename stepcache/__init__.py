"""Compile a training step once, keep it on every device, and know why it compiled.

`step` is a drop-in for `jax.jit` over a cache of programs that can be asked why; a `Session` adds
a mesh and the rules that place what a call brings.
"""

import os as _os
import sys as _sys
import time as _time

from stepcache import run_command as _run

if _run.is_asked():
    _run.main(_sys.argv[2:])

_started = _time.perf_counter()

import importlib as _importlib
import typing as _typing

from stepcache import jaxcompat as _jaxcompat
from stepcache.calls.context import no_recompile
from stepcache.calls.pad import Pad
from stepcache.errors import (
    AgreementError,
    CacheDirectoryError,
    CarryError,
    DeadlineError,
    DonationError,
    ForkedProcessError,
    OptimizerWarning,
    OptionError,
    PaddingError,
    PlacementError,
    RankLostError,
    RecompileError,
    RecompileWarning,
    ServerLostError,
    SessionClosedError,
    StaleProgramError,
    StepCacheError,
    StepCacheWarning,
    TaskError,
    TransferBudgetError,
    UnmatchedRuleWarning,
    VariablesError,
)
from stepcache.events import Change, Miss, StepStats, recorder
from stepcache.install import begin_program as _begin_program
from stepcache.install import install, uninstall
from stepcache.programs.cache import CacheInfo, ProgramCache
from stepcache.programs.opening import look_ahead as _look_ahead
from stepcache.report import progress as _progress  # noqa: F401  (subscribes to the recorder)
from stepcache.session import Session, current_session
from stepcache.sharding import Rules
from stepcache.step import Step, step
from stepcache.storage import run_log as _history

if _typing.TYPE_CHECKING:
    from stepcache.deployment import DeploymentConfig
    from stepcache.report.advice import Advice, advise
    from stepcache.report.explanation import Explanation
    from stepcache.serving.connecting import connect
    from stepcache.serving.row_optimizers import RowOptimizer
    from stepcache.variables.checkpoints import save
    from stepcache.variables.policy import OnHost, Read, Replicated, Sharded, Write
    from stepcache.variables.restoring import restore
    from stepcache.variables.variables import Variables
else:  # Type checkers would let every name pass.
    # Imported when they are first asked for, as many programs do not use them: names by module.
    _LATER = {
        "deployment": "DeploymentConfig",
        "report.advice": "Advice advise",
        "report.explanation": "Explanation",
        "serving.connecting": "connect",
        "serving.row_optimizers": "RowOptimizer",
        "variables.checkpoints": "save",
        "variables.policy": "OnHost Read Replicated Sharded Write",
        "variables.restoring": "restore",
        "variables.variables": "Variables",
    }
    _MODULES = {name: module for module, names in _LATER.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _importlib.import_module(f"{__name__}.{_MODULES[name]}")
        globals()[name] = found = getattr(module, name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

# fmt: off
__all__ = [
    "Advice", "AgreementError", "CacheDirectoryError", "CacheInfo", "CarryError", "Change",
    "DeadlineError", "DeploymentConfig", "DonationError", "Explanation", "ForkedProcessError",
    "Miss", "OnHost", "OptimizerWarning", "OptionError", "Pad", "PaddingError", "PlacementError",
    "ProgramCache", "RankLostError", "Read", "RecompileError", "RecompileWarning", "Replicated",
    "RowOptimizer", "Rules", "ServerLostError", "Session", "SessionClosedError", "Sharded",
    "StaleProgramError", "Step", "StepCacheError", "StepCacheWarning", "StepStats", "TaskError",
    "TransferBudgetError", "UnmatchedRuleWarning", "Variables", "VariablesError", "Write", "advise",
    "connect", "current_session", "install", "no_recompile", "recorder", "restore", "save", "step",
    "uninstall",
]
# fmt: on

_jaxcompat.hide_frames(_os.path.dirname(_os.path.abspath(__file__)))
_history.import_seconds = _time.perf_counter() - _started
_look_ahead()
if _run.OPTIONS in _os.environ:
    _begin_program(_os.environ[_run.OPTIONS])


def load_ipython_extension(shell: object) -> None:
    """What `%load_ext stepcache` does: `install`."""
    install()
