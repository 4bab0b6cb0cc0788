"""`stepcache run` and `install`: a JAX program as it is, with all that it compiles cached."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from stepcache import jaxcompat

pytestmark = pytest.mark.skipif(
    not jaxcompat.CAN_STORE, reason="programs are stored through JAX's private API"
)

# Functions decorated in the ways that people have, eager operations, and a library's jits.
PROGRAM = """
import functools, sys
import jax, numpy as np, optax
from jax import jit
import jax.numpy as jnp

@jax.jit
def loss(w, x):
    return jnp.mean(jnp.square(x @ w))

@functools.partial(jit, static_argnames="power")
def penalty(w, power):
    return jnp.sum(w**power)

@jax.jit(donate_argnums=0)
def scaled(x):
    jax.debug.print("scaled {}", x[0])
    return x * 2

w = jax.random.normal(jax.random.key(0), (8, 4))
x = jnp.linspace(0, 1, 64).reshape(8, 8)
optimizer = optax.adam(0.1)
state = optimizer.init(w)
for _ in range(3):
    updates, state = optimizer.update(jax.grad(loss)(w, x), state)
    w = optax.apply_updates(w, updates)
print(float(loss(w, x)), float(penalty(w, power=2)), np.asarray(scaled(jnp.arange(3.0))).tolist())
"""


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def run(directory, *arguments, plain=False, **environment):
    command = [sys.executable, *([] if plain else ["-m", "stepcache", "run"]), *arguments]
    environment = {**os.environ, "STEPCACHE_DIR": str(directory / "programs"), **environment}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )


def write(directory, source, name="script.py"):
    (directory / name).write_text(textwrap.dedent(source))
    return name


def counts(done):
    """What the line at the end says, by where the programs were."""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("stepcache: "), done.stderr
    return {source: int(count) for count, source in re.findall(r"(\d+) (\w+)", line)}


def test_a_second_and_a_third_start_compile_nothing_and_print_the_same(directory):
    plain = run(directory, "train.py", plain=True)
    assert plain.returncode == 0, plain.stderr
    starts = [run(directory, "train.py") for _ in range(3)]
    assert [each.stdout for each in starts] == [plain.stdout] * 3, starts[0].stderr
    first, *later = map(counts, starts)
    assert first["compiled"] > 8 and first["programs"] == first["compiled"] + first.get("shared", 0)
    callbacks = 0 if jaxcompat.hooks._BINDS_CALLBACKS else 1
    for each in later:
        assert each.get("compiled", 0) == callbacks and each["programs"] == first["programs"]
        assert each["preloaded"] > 8


def test_the_run_log_names_what_is_compiled_outside_of_steps(directory):
    script = write(directory, "import jax.numpy as jnp\njnp.sin(jnp.arange(3.0))\n")
    run(directory, script)
    environment = {**os.environ, "STEPCACHE_DIR": str(directory / "programs")}
    command = [sys.executable, "-m", "stepcache", "cache", "why"]
    why = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert "jit_sin (jit:jit_sin): compiled" in why.stdout and "outside of any" in why.stdout


def test_what_a_program_sees_of_how_it_is_run(directory):
    script = write(
        directory,
        """
        import os, sys, __main__
        print(sys.argv, __name__, __main__.__file__, sys.path[0], __spec__)
        import jax
        def fail():
            raise ValueError("of the program")
        if "fail" in sys.argv:
            fail()
        sys.exit(3)
        """,
    )
    for arguments in ([script, "a", "--quiet"], [script, "fail"]):
        plain, ours = run(directory, *arguments, plain=True), run(directory, *arguments)
        seen = ours.stdout, ours.stderr, ours.returncode
        assert seen == (plain.stdout, plain.stderr, plain.returncode)


def test_a_module_and_a_hidden_sitecustomize(directory):
    write(directory, "import sys; sys.user_has_been_here = 1", "sitecustomize.py")
    (directory / "package").mkdir()
    source = "import jax, sys; print(sys.user_has_been_here, type(jax.jit(abs)).__name__, sys.argv)"
    write(directory / "package", source, "__main__.py")
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    done = run(directory, "--quiet", "-m", "package", "1", PYTHONPATH=path)
    assert done.stdout.startswith("1 Step [") and "'1']" in done.stdout, done.stderr
    assert done.stderr == ""


def test_children_are_cached_too_and_one_line_is_printed(directory):
    script = write(
        directory,
        """
        import multiprocessing
        import jax, jax.numpy as jnp

        def work(number):
            return float(jax.jit(lambda x: x * 3 + 1)(jnp.float32(number)))

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(work, range(4)), work(5))
        """,
    )
    for _ in range(2):
        done = run(directory, script)
        assert done.stdout == "[1.0, 4.0, 7.0, 10.0] 16.0\n", done.stderr
        assert done.stderr.count("stepcache:") == 1


def test_a_program_that_imports_stepcache_first(directory):
    source = "import stepcache as sc, jax; print(jax.jit is sc.step)"
    assert run(directory, write(directory, source)).stdout == "True\n"


def test_the_line_is_printed_where_a_program_has_put_a_stream_that_it_closes(directory):
    script = write(
        directory,
        """
        import io, sys
        own, sys.stderr = sys.stderr, io.StringIO()
        import jax.numpy as jnp
        jnp.ones(3) * 2
        sys.stderr.close()
        sys.stderr = own
        """,
    )
    assert counts(run(directory, script))["compiled"] > 0


def test_a_program_without_jax(directory):
    source = "import sys; print('stepcache' in sys.modules)"
    done = run(directory, write(directory, source))
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(("choice", "warm"), [("warn", 1), ("error", 1), ("error", 4)])
def test_misses_are_explained_warned_of_or_errors(directory, choice, warm):
    script = write(
        directory,
        """
        import jax, numpy as np
        double = jax.jit(lambda batch: batch * 2)
        for size in (4, 5, 6, 7):
            double(np.ones(size, np.float32))
        """,
    )
    options = ["--on-miss", choice, "--warm-steps", str(warm), "--explain"]
    done = run(directory, *options, script)
    assert "float32[4] → float32[5] (axis 0)" in done.stderr
    if (choice, warm) == ("error", 1):
        assert done.returncode == 1 and "RecompileError" in done.stderr
        return
    assert done.returncode == 0 and ("RecompileWarning" in done.stderr) == (choice == "warn")
    last = done.stderr.splitlines()[-1]
    assert f"{script}:3 <lambda> compiled 4 times (axis 0 of batch has had 4 sizes" in last
    assert "pad it to a few sizes" in last


EQUINOX = """
import equinox as eqx, jax, jax.numpy as jnp

class Net(eqx.Module):
    layers: list
    scale: float = eqx.field(static=True)

    def __init__(self, size, scale):
        self.layers = [eqx.nn.Linear(size, size, key=jax.random.key(0))]
        self.scale = scale

    def __call__(self, x):
        return self.layers[0](x) * self.scale

@eqx.filter_jit
def train_step(model, x, *, weights):
    return model(x).sum() + weights["a"]

def call(size, scale):
    model = Net(size, scale)
    train_step(model, jnp.ones(size), weights={"a": jnp.ones(())})
    eqx.filter_jit(model)(jnp.ones(size))
"""
NNX = """
import jax.numpy as jnp, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, size, scale):
        self.layers = nnx.List([nnx.Linear(size, size, rngs=nnx.Rngs(0))])
        self.scale = scale

    def __call__(self, x):
        return self.layers[0](x) * self.scale

@nnx.jit
def train_step(model, metrics, x):
    metrics.update(loss=model(x).sum())

def call(size, scale):
    train_step(Net(size, scale), nnx.metrics.Average("loss"), jnp.ones(size))
"""
CALLS = """
call(3, 1.0)
call(4, 1.0)
call(4, 2.0)
"""


@pytest.mark.parametrize(
    ("source", "path", "of_callable"),
    [(EQUINOX, "layers[0].weight", "self."), (NNX, "layers[0].kernel", "model.")],
    ids=["equinox", "nnx"],
)
def test_misses_inside_of_libraries_name_what_the_user_wrote(directory, source, path, of_callable):
    pytest.importorskip("equinox") if source is EQUINOX else None
    done = run(directory, "--explain", "--quiet", write(directory, source + CALLS))
    assert done.returncode == 0, done.stderr
    by_step = [each for each in done.stderr.split("stepcache: ") if each.startswith("train_step")]
    _, size, scale = by_step
    assert f"model.{path}: float32[3,3] → float32[4,4] (axis 0, 1)" in size
    assert "x: float32[3] → float32[4] (axis 0)" in size
    assert "model.scale: 1.0 → 2.0" in scale and scale.count("→") == 1
    assert f"{of_callable}{path}: float32[3,3] → float32[4,4]" in done.stderr
    assert "dynamic_" not in done.stderr and "graphdef" not in done.stderr


@pytest.mark.parametrize("source", [EQUINOX, NNX], ids=["equinox", "nnx"])
def test_the_last_line_names_functions_inside_of_libraries(directory, source):
    pytest.importorskip("equinox") if source is EQUINOX else None
    calls = "for size in (2, 3, 4, 5): call(size, 1.0)\n"
    done = run(directory, write(directory, source + calls))
    line = source.splitlines().index("@eqx.filter_jit" if source is EQUINOX else "@nnx.jit") + 1
    assert f"script.py:{line} train_step compiled 4 times (" in done.stderr.splitlines()[-1]


def test_the_functions_that_compiled_most_are_named(directory):
    script = write(
        directory,
        """
        import functools, jax, numpy as np
        def power(x, n):
            return x ** n
        for times in (4, 6, 5, 3, 7):
            f = jax.jit(functools.wraps(power)(lambda x, n: x ** n), static_argnames="n")
            for n in range(times):
                f(np.ones(times, np.float32), n=n + 2)
        """,
    )
    last = run(directory, script).stderr.splitlines()[-1]
    assert re.search(r"\d+ compiled in [\d.]+ m?s; script.py:3 power compiled \d+ times \(", last)
    write(directory, "import jax\nf = jax.jit(lambda x: x * 2)\nf(1.0)\n")
    assert "compiled in" in run(directory, script).stderr.splitlines()[-1]
    assert re.search(
        r"1 preloaded(; [\d.]+ m?s of compilation saved)?$", run(directory, script).stderr
    )


def test_the_report_of_a_run_and_a_bound_on_memory(directory):
    script = write(
        directory,
        """
        import jax, numpy as np, stepcache
        f = jax.jit(lambda x: x * 2)
        for size in (1, 2, 3):
            f(np.ones(size, np.float32))
        print(f.stats().evictions, "evicted")
        """,
    )
    done = run(directory, "--max-memory", "1B", "--report", "out.html", "--quiet", script)
    assert done.stdout == "2 evicted\n" and done.stderr == ""
    page = (directory / "out.html").read_text()
    assert page.startswith("<!doctype html>") and "script.py" in page
    done = run(directory, "--report", "out.gif", "--quiet", script)
    assert done.returncode == 0 and "the suffix of 'out.gif' names no format" in done.stderr
    done = run(directory, "--report", "out.html", "--quiet", script, STEPCACHE_DIR="off")
    assert "no report is written: STEPCACHE_DIR=off" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the SCRIPT is missing"),
        (["--max-memory", "much", "script.py"], "argument --max-memory"),
        (["--on-miss", "stop", "script.py"], "argument --on-miss"),
        (["--unknown", "script.py"], "--unknown"),
    ],
)
def test_wrong_usage_is_said(directory, arguments, said):
    done = run(directory, *arguments)
    assert done.returncode == 2 and said in done.stderr and "usage: stepcache run" in done.stderr


def test_all_that_follows_the_script_is_its_own(directory):
    script = write(directory, "import sys; print(sys.argv[1:])")
    given = ["-m", "--dir", "x", "--", "--quiet", "-h"]
    assert run(directory, script, *given).stdout == f"{given}\n"
    assert run(directory, "--quiet", "--", script, "--", "1").stdout == "['--', '1']\n"


def test_flags_of_python_are_those_of_the_program(directory):
    script = write(directory, "import sys; print(sys.flags.optimize, sys._xoptions, sys.argv[1:])")
    done = run(
        directory, "-O", "-X", "faulthandler", "-m", "stepcache", "run", script, "-m", plain=True
    )
    assert done.stdout == "1 {'faulthandler': True} ['-m']\n", done.stderr


def test_ctrl_c_ends_the_program_as_without(directory):
    # A signal that comes just before a sleep begins does not end that, in any Python program.
    script = write(directory, "import jax, time\nprint(1, flush=True)\nwhile True: time.sleep(0.1)")
    command = [sys.executable, "-X", "faulthandler", "-m", "stepcache", "run", script]
    process = subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # It says where it is.
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors, errors


def test_installed_twice_and_uninstalled(directory):
    script = write(
        directory,
        """
        import jax
        plain = jax.jit
        import stepcache as sc
        from stepcache.install import _counts
        sc.install()
        sc.install()
        assert jax.jit is sc.step and type(jax.jit(lambda x: x)) is sc.Step
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        placed = jax.jit(lambda x, n: x * n, static_argnums=1, out_shardings=sharding)
        shape = jax.eval_shape(placed, 1.0, 2)
        assert shape.sharding == sharding and shape.shape == ()
        assert jax.eval_shape(lambda x: x, 1.0).shape == ()
        import jax.numpy as jnp
        jnp.sin(jnp.ones(3)).block_until_ready()
        before = sum(_counts.programs.values())
        assert before > 0
        sc.uninstall()
        sc.uninstall()
        assert jax.jit is plain and "stepcache" not in jax.eval_shape.__code__.co_filename
        jnp.cos(jnp.ones(5)).block_until_ready()
        assert sum(_counts.programs.values()) == before
        sc.install()
        jnp.tan(jnp.ones(7)).block_until_ready()
        assert sum(_counts.programs.values()) > before
        """,
    )
    done = run(directory, script, plain=True)
    assert done.returncode == 0, done.stderr


def test_the_launcher_imports_little(directory):
    """The program waits for it. Without `site`, which may import as much itself."""
    script = write(directory, "")
    found = os.path.dirname(os.path.dirname(jaxcompat.__path__[0]))
    flags = ("-S", "-X", "importtime", "-m", "stepcache", "run")
    done = run(directory, *flags, script, plain=True, PYTHONPATH=found)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "stepcache.run_command" in imported
    assert not {"argparse", "json", "re", "typing"} & imported


def test_collections_leave_out_what_jax_has_imported_and_nothing_of_the_program(directory):
    """What is in a cycle is freed at the end as ever: a file that nobody closes is written."""
    source = """
    import gc, sys
    print(gc.get_freeze_count() < 1000)
    import jax
    print(gc.get_freeze_count() > 100_000, gc.isenabled())
    class Trainer:
        def __init__(self):
            self.log, self.call = open("log.txt", "w"), self.step
        def step(self):
            self.log.write("a line")
    trainer = Trainer()
    trainer.step()
    class Node: pass
    node = Node()
    node.node = node
    del node
    print(gc.collect() > 0)
    """
    done = run(directory, write(directory, source))
    assert done.stdout.splitlines() == ["True", "True True", "True"], done.stderr
    assert (directory / "log.txt").read_text() == "a line"
