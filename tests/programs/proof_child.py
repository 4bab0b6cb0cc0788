"""Runs the scripts of a directory and writes what each did. Not a test.

`python proof_child.py DIRECTORY OUTPUT`, with `REFERENCE=1` under plain `jax.jit`.
"""

import contextlib
import importlib.util
import io
import json
import os
import sys
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler

made, ticks, compiled = [], [], []  # Of one script: steps, traces, names of compiled modules.


def step(*args, **options):
    import stepcache as sc

    if not args:
        return lambda fun: step(fun, **options)
    made.append(sc.step(*args, **options))
    return made[-1]


def tick():
    ticks.append(threading.current_thread() is threading.main_thread())


def described(leaf):
    if not isinstance(leaf, jax.Array):
        return repr(leaf)
    about = leaf.shape, leaf.dtype, leaf.sharding, leaf.committed
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    order = [device.id for device in leaf.sharding._device_assignment]
    return np.asarray(leaf).tobytes().hex(), leaf.weak_type, order, repr(about)


def run(path, size):
    for each in (made, ticks, compiled):
        each.clear()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    x = np.linspace(1, 2, size, dtype=np.float32)
    chosen = jax.jit if "REFERENCE" in os.environ else step
    vars(module).update(jax=jax, jnp=jnp, np=np, step=chosen, tick=tick, x=x)
    printed, raised = io.StringIO(), ""
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            spec.loader.exec_module(module)
            jax.effects_barrier()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    leaves, tree = jax.tree.flatten(getattr(module, "out", None))
    stats = [each.stats() for each in made]
    return {
        "observed": {
            "outputs": [repr(tree), *map(described, leaves)],
            "printed": printed.getvalue(),
            "warned": [f"{each.category.__name__}: {each.message}" for each in warned],
            "traced in the calling thread": list(ticks),
            "raised": raised,
        },
        "misses": [str(each.last_miss) for each in made],
        "compiles": sum(each.compiles for each in stats),
        "loads": sum(each.loads for each in stats),
        "compiled": list(compiled),
    }


def main(directory, output):
    jax.config.update("jax_num_cpu_devices", 8)
    compile_it = compiler.backend_compile_and_load

    def compile_noted(backend, module, *args, **options):
        compiled.append(module.operation.attributes["sym_name"].value)
        return compile_it(backend, module, *args, **options)

    compiler.backend_compile_and_load = compile_noted
    sys.path.insert(0, str(directory))
    names = (directory / "names").read_text().split()
    # Each has an `x` of another size, so that no two lower to one module.
    found = {name: run(directory / f"{name}.py", size) for size, name in enumerate(names, 8)}
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
