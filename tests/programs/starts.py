"""Starts of a program that uses an installed package, in one process.

The same source made anew stands for another process, with the packages that it uses imported anew.
"""

import sys
import textwrap
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import stepcache as sc
from stepcache.programs import resolve

BUILT, WITHOUT_COMPILING, WITHOUT_A_TRACE = (1, 1, 0), (1, 0, 1), (0, 0, 1)


def unload(package):
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        del sys.modules[name]


def start(source, package, tmp_path, verify="off"):
    """One start of a program, up to its first result, and to the end of its check; its module."""
    unload(package)
    cache = sc.ProgramCache(tmp_path / "programs", verify=verify)
    module = types.ModuleType("life")
    path = tmp_path / "life.py"
    path.write_text(textwrap.dedent(source))
    module.__dict__.update(jax=jax, jnp=jnp, np=np, sc=sc, __file__=str(path))
    sys.modules["life"] = module
    at_once = {"_QUIET_SECONDS": 0.0, "_LONGEST_WAIT": 0.0}
    with mock.patch.multiple(resolve, **at_once), sc.Session(cache=cache):
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        for _ in range(2):
            found = np.asarray(module.step(np.arange(3, dtype=np.float32))).tolist()
            assert found == [0, 2, 4], found
            cache.flush()  # It submits the check.
            cache.archive().verifier.flush()
    cache.flush()
    return module


class Levels(tuple):
    """Traces, compiles, loads of a step, shown with its last miss."""

    def __repr__(self):
        return f"{tuple(self)}: {self.miss}"


def levels(module):
    stats = module.step.stats()
    found = Levels((stats.traces, stats.compiles, stats.loads))
    found.miss = module.step.last_miss
    return found
