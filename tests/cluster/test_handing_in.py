"""Each process hands in its part of a batch, and the whole of everything else."""

import pytest

from tests.cluster.pods import run_pod, succeeded

KINDS = """
mesh = jax.make_mesh({shape}, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
rules = [("table", P(None, "model")), ("wide", P("data", "model")), ("^lengths", P("data"))]
@sc.step(carry="state", batch="batch")
def step(state, batch, scale, lengths):
    x, rows = batch["x"], jnp.arange(batch["x"].shape[0], dtype=jnp.float32)
    noise = jax.random.normal(batch["key"], ()) * 0
    total = (x * rows[:, None]).sum() + batch["wide"].sum() + (batch["table"] * scale).sum() + noise
    total = total + (lengths * rows).sum()
    return {{"w": state["w"] + x.sum(), "n": state["n"] + 1}}, total, x.shape[0]
def call(state, value):
    # What of a batch is split along "data" comes in parts; the rest is whole on each process.
    ours = [{{device.process_index for device in row}} for row in mesh.devices]
    rows = [number for number, processes in enumerate(ours) if RANK in processes]
    x = np.arange(8 * 3, dtype=np.float32).reshape(8, 3) * value
    per = 8 // mesh.devices.shape[0]
    mine = np.concatenate([x[i * per:(i + 1) * per] for i in rows])
    batch = {{"x": mine, "wide": np.ones((len(mine), 4), np.float32) if len(rows) else None,
             "table": jnp.ones((2, 4)), "key": jax.random.key(0)}}
    return step(state, batch, 0.5, np.arange(8.0))  # No batch: whole, wherever a rule puts it.
with sc.Session(mesh, rules=rules):
    state = {{"w": np.zeros((), np.float32), "n": 0}}
    for value in (1.0, 2.0, 3.0):
        state, total, rows = call(state, value)
        say("total", float(total), int(rows), float(state["w"]), int(state["n"]))
    assert step.stats().misses == 1 and step.stats().delegated == 0, step.stats()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "count", "devices"),
    [pytest.param((4, 2), 2, 4, marks=pytest.mark.slow), ((2, 4), 4, 2)],
)
def test_the_whole_is_what_one_process_has(shared_pod, tmp_path, shape, count, devices):
    """Also where several processes share a row of the mesh, and hand in the same part."""
    script = KINDS.format(shape=shape)
    (tmp_path / "one").mkdir()
    (alone,) = succeeded(shared_pod(1, 8).run(tmp_path / "one", script))
    for rank in succeeded(shared_pod(count, devices).run(tmp_path, script)):
        assert rank.said("total") == alone.said("total")


@pytest.mark.slow
@pytest.mark.parametrize("passed", ["state, batch", "state, batch=batch"])
def test_a_call_like_the_one_before_does_not_read_its_state(shared_pod, tmp_path, passed):
    """Only its host arrays are looked at; the rest is JAX's dispatcher's affair."""
    script = """
    @sc.step(carry="state", batch="batch")
    def step(state, batch):
        return [x + batch.sum() for x in state], batch.sum()
    def call(state, batch):
        return step(PASSED)
    with sc.Session(mesh):
        state = [np.ones(2, np.float32) for _ in range(20)]
        for number in range(6):
            state, total = call(state, np.full(3, number, np.float32))
            say("total", float(total), float(state[7][0]))
        say("hits", step.stats().hits)
        state, total = call(state, np.ones(4, np.float32))
        say("misses", step.stats().misses, float(total))
        state, total = call(state, np.ones(3, np.float32))
        say("misses", step.stats().misses, float(total))
    with sc.Session(mesh, count_hits=True):
        before = step.stats().hits
        for _ in range(3):
            state, total = call(state, np.ones(3, np.float32))
        say("counted", step.stats().hits - before)
    """
    for rank in succeeded(shared_pod(2).run(tmp_path, script.replace("PASSED", passed))):
        totals = [6.0 * number for number in range(6)]
        assert [float(line.split()[0]) for line in rank.said("total")] == totals
        assert rank.said("total")[-1].split()[1] == str(1 + sum(totals))
        assert int(rank.said("hits")[0]) <= 2
        assert rank.said("misses") == ["2 8.0", "2 6.0"]
        assert int(rank.said("counted")[0]) >= 2


def test_what_does_not_divide_is_said(shared_pod, tmp_path):
    script = """
    step = sc.step(lambda batch: batch.sum(), batch="batch")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with sc.Session(mesh):
        try:
            step(np.ones(3, np.float32))
        except sc.PlacementError as error:
            say("error", str(error).replace(chr(10), " "))
    """
    for rank in succeeded(shared_pod(2, 2).run(tmp_path, script)):
        assert "is not divisible" in rank.said("error")[0] and "size 6" in rank.said("error")[0]


EVERY_KIND = """
import itertools
def global_array(value):
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), value)
KINDS = {
    "none": lambda n: None, "int": lambda n: n, "float": lambda n: float(n), "bool": lambda n: True,
    "numpy scalar": lambda n: np.float32(n), "numpy": lambda n: np.full(3, n, np.float32),
    "key": lambda n: jax.random.key(n), "old key": lambda n: jax.random.PRNGKey(n),
    "local": lambda n: jnp.full(3, float(n)), "tree": lambda n: {"a": n, "b": np.float32(n)},
}
@sc.step(carry="state", batch="batch", static_argnames=("train",))
def step(state, batch, extra=None, train=True):
    is_key = hasattr(extra, "dtype") and jnp.issubdtype(extra.dtype, jax.dtypes.prng_key)
    if is_key:
        extra = jax.random.key_data(extra) * 0
    total = sum(jnp.sum(x).astype(jnp.float32) for x in jax.tree.leaves(extra))
    return state + batch.sum(), total * (1 if train else 2)
made = {"plain": lambda: jnp.zeros(()), "host": lambda: np.zeros((), np.float32),
        "variables": lambda: sc.Variables(np.zeros((), np.float32))}
batches = {"host": np.ones(2, np.float32), "global": global_array(np.ones(2, np.float32))}
with sc.Session(mesh):
    cases = itertools.product(made, batches, KINDS, ("positional", "keyword", "static"))
    for state_kind, batch_kind, kind, how in list(cases)[::EVERY]:
        state, batch, value = made[state_kind](), batches[batch_kind], KINDS[kind]
        for number in range(10):
            if how == "positional":
                state, total = step(state, batch, value(number))
            else:
                more = dict(extra=value(number), train=how != "static")
                state, total = step(state, batch, **more)
        result = state.value if state_kind == "variables" else state
        assert float(result) == 20.0 * SCALE, (state_kind, batch_kind, kind, how, result)
say("misses", step.stats().misses)
"""


@pytest.mark.parametrize(
    ("count", "every"),
    [(2, 7), *(pytest.param(count, 1, marks=pytest.mark.slow) for count in (2, 4))],
)
def test_every_kind_of_argument_over_ten_calls(shared_pod, tmp_path, count, every):
    """Scalars, keys and local arrays stay host values on each process, whatever the others are."""
    script = EVERY_KIND.replace("SCALE", str(count)).replace("EVERY", str(every))
    ranks = succeeded(shared_pod(count).run(tmp_path, script))
    assert len({tuple(rank.said("misses")) for rank in ranks}) == 1


COST = """
@sc.step(batch="batch")
def step(batch):
    return [x + 1 for x in batch]
split = NamedSharding(mesh, P("data"))
batch = [np.full((COUNT * 2, 3), RANK, np.float32) for _ in range(50)]
plain = jax.jit(lambda batch: [x + 1 for x in batch])
def calls(function):
    for _ in range(3):
        function()
    counts = {"call": 0, "c_call": 0}
    def count(frame, event, argument):
        if event in counts:
            counts[event] += 1
    sys.setprofile(count)
    function()
    sys.setprofile(None)
    return counts
with sc.Session(mesh):
    ours = calls(lambda: step(batch))
    plains = calls(lambda: plain(jax.make_array_from_process_local_data(split, batch)))
say("calls", ours["call"], ours["c_call"], plains["call"], plains["c_call"])
"""


def test_a_hit_does_less_in_python_than_plain_jax(shared_pod, tmp_path):
    """Which device gets which slice is decided once, and not at each call as by JAX."""
    for rank in succeeded(shared_pod(2, 2).run(tmp_path, COST)):
        python, c, plain_python, plain_c = map(int, rank.said("calls")[0].split())
        assert python < plain_python / 2 and c < plain_c


SAME_AS_JAX = """
from stepcache.pods.global_arrays import global_array
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
generator = np.random.default_rng(0)
def make(shape, dtype):
    return (generator.normal(size=shape) * 50).astype(dtype)
values = [make((8, 6), each) for each in ("f4", "f8", "i4", "i8", "u1", "bool", "c8", "f2")]
values += [np.float32(3), np.int64(3), np.asfortranarray(make((8, 6), "f4")), jnp.ones((8, 6)),
           make((16, 6), "f4")[::2], make((8, 6), "f4").astype(jnp.bfloat16), np.zeros((8, 0))]
specs = [P(), P("data"), P("data", "model"), P(None, "model"), P(("data", "model")), P("model")]
for where in (mesh, explicit):
    for spec in specs:
        sharding = NamedSharding(where, spec)
        for value in values:
            whole = np.shape(value)
            parts = 2 if spec and spec[0] in ("data", ("data", "model")) else 1
            for shape in {whole, (whole[0] * parts, *whole[1:]) if whole else whole}:
                if len(spec) > len(shape):
                    continue
                for x64 in (False, True):
                    with jax.enable_x64(x64):
                        ours = global_array(value, sharding, shape)
                        theirs = jax.make_array_from_process_local_data(
                            sharding, np.asarray(value), shape)
                    assert ours.aval == theirs.aval and ours.sharding == theirs.sharding
                    assert ours.committed == theirs.committed
                    for one, other in zip(ours.addressable_shards, theirs.addressable_shards):
                        assert one.device == other.device and one.index == other.index
                        np.testing.assert_array_equal(one.data, other.data)
try:
    global_array(np.ones((3, 2)), NamedSharding(mesh, P("data")), (8, 2))
except ValueError as error:
    say("refused", "match" in str(error))
say("same")
"""


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["cpp", pytest.param("public", marks=pytest.mark.slow)])
def test_arrays_of_a_pod_are_those_that_jax_makes(tmp_path, dispatch):
    variables = {"STEPCACHE_DISPATCH": dispatch}
    for rank in succeeded(run_pod(tmp_path, SAME_AS_JAX, 2, devices=4, variables=variables)):
        assert rank.said("refused") == ["True"] and rank.said("same") == [""], rank.output
