"""Python runs this before a program under `stepcache run`: it imports stepcache once JAX is there.

The program may never import JAX, so nothing is imported here but what Python has imported anyway.
A `sitecustomize` of the user's own, which this one hides, runs after it.
"""

import contextlib
import gc
import importlib
import os
import sys
from importlib.util import find_spec
from typing import Any


class _AfterJax:
    """Finds JAX as Python does, and has stepcache imported after it; it installs itself then."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "jax":
            return None
        sys.meta_path.remove(cls)
        spec: Any = find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def execute_both(module: Any) -> None:
                # These imports make half a million objects that stay. They would be looked through
                # by each full collection, and by four of them at the end of the process.
                was_enabled = gc.isenabled()
                gc.disable()
                try:
                    execute(module)
                    if find_spec("stepcache") is not None:  # Another Python may lack it.
                        importlib.import_module("stepcache")
                    gc.freeze()
                finally:
                    if was_enabled:
                        gc.enable()

            spec.loader.exec_module = execute_both
        return spec


sys.meta_path.insert(0, _AfterJax)
_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _here]
_own = sys.modules.pop("sitecustomize")
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("sitecustomize")
sys.modules.setdefault("sitecustomize", _own)
