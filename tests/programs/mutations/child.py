"""Runs many small steps in one process and says how each came: `python child.py plan.json`.

Not a test. The plan names a directory with one folder a step, and where to put what was found.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path


def run_all(plan):
    import jax
    import numpy as np

    import stepcache as sc

    cache = sc.ProgramCache(plan["cache"], verify="off")
    found = {}
    for name in plan["steps"]:
        sys.path.insert(0, str(Path(plan["root"]) / name))
        try:
            module = importlib.import_module(name)
            with getattr(module, "context", contextlib.nullcontext)():
                found[name] = run_one(jax, np, sc, cache, module)
            getattr(module, "restore", lambda: None)()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        sys.path.pop(0)
    cache.flush()
    Path(plan["output"]).write_text(json.dumps(found))


def run_one(jax, np, sc, cache, module):
    options = getattr(module, "options", {})
    usual = (np.arange(1, 9, dtype=np.float32),)
    keywords = getattr(module, "keywords", {})
    with sc.Session(cache=cache, **getattr(module, "session", {})):
        step = module.step
        if not isinstance(step, sc.step.__globals__["Step"]):
            step = sc.step(step, **options)
        result = values(jax, np, step(*getattr(module, "arguments", usual), **keywords))
    stats, miss = step.stats(), step.last_miss
    plain = {name: value for name, value in options.items() if name not in ("carry", "batch")}
    arguments = getattr(module, "arguments", usual)  # Once more: the step may have donated them.
    expected = jax.jit(step.__wrapped__, **plain)(*arguments, **keywords)
    return {
        "result": result,
        "expected": values(jax, np, expected),
        "level": 1 if not stats.traces else 2 if not stats.compiles else 3,
        "changes": [f"{change.part}: {change}" for change in miss.changes],
        "untrackable": list(miss.untrackable),
        "miss": str(miss),
    }


def values(jax, np, tree):
    return [np.asarray(leaf, np.float64).tolist() for leaf in jax.tree.leaves(tree)]


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()))
