"""`Variables` over several processes mean what they mean in one."""

import re

import pytest

from tests.cluster.pods import run_pod, succeeded

TRAINING = """
import optax
optimizer = optax.adam(1e-2)
@sc.step(carry=("params", "moments"), batch="batch")
def train(params, moments, batch):
    def loss_of(p):
        return ((jnp.tanh(batch["x"] @ p["a"]) @ p["b"] - batch["y"]) ** 2).mean() + p["s"] ** 2
    loss, gradient = jax.value_and_grad(loss_of)({key: params[key] for key in "abs"})
    updates, moments = optimizer.update(gradient, moments, {key: params[key] for key in "abs"})
    new = optax.apply_updates({key: params[key] for key in "abs"}, updates)
    return {**params, **new, "n": params["n"] + 1}, moments, loss
generator = np.random.default_rng(0)
X = generator.normal(size=(32, 8)).astype(np.float32)
Y = X.sum(1, keepdims=True)
mine = slice(RANK * 32 // COUNT, (RANK + 1) * 32 // COUNT)
batch = {"x": X[mine], "y": Y[mine]}
values = {"a": generator.normal(size=(8, 16)).astype(np.float32),
          "b": generator.normal(size=(16, 1)).astype(np.float32), "s": np.float32(0.5),
          "n": 0, "key": jax.random.key(3)}
def fresh(placement, read):
    moments = optimizer.init({key: values[key] for key in "abs"})
    return (sc.Variables(values, placement=placement, read=read, name="params"),
            sc.Variables(moments, placement=placement if isinstance(placement, sc.OnHost)
                         else sc.Replicated(), read=read))
def run(params, moments, steps):
    losses = []
    for _ in range(steps):
        params, moments, loss = train(params, moments, batch)
        losses.append(float(loss))
    return losses
PLACEMENTS = {
    "replicated": (sc.Replicated(), sc.Read()),
    "sharded": (sc.Sharded([("a$", P(None, "data")), ("", P())]), sc.Read()),
    "on host": (sc.OnHost(), sc.Read()),
    "on host, kept": (sc.OnHost(), sc.Read(cache="device")),
    "on host, split": (sc.OnHost(sc.Sharded([("a$", P(None, "data")), ("", P())])), sc.Read()),
}
"""


def losses_of(rank, name):
    (text,) = [line for line in rank.said("losses") if line.startswith(name + ":")]
    return [float(each) for each in re.findall(r"[\d.]+(?:e-\d+)?", text.partition(":")[2])]


def test_losses_are_those_of_one_process_with_as_many_devices(shared_pod, tmp_path):
    """To float rounding: gloo adds up in another order than one process does."""
    script = (
        TRAINING
        + """
with sc.Session(mesh):
    for name, how in PLACEMENTS.items():
        params, moments = fresh(*how)
        say("losses", name + ":", run(params, moments, 6))
        assert params.version == 6 and params.value["n"] == 6, params
        look = params.value["a"]
        assert look.shape == (8, 16)
        if name.startswith("on host"):
            split = "split" in name and COUNT > 1
            assert type(look) is not np.ndarray if split else type(look) is np.ndarray
            assert not split or look.sharding.memory_kind == "pinned_host"
            # What was seen can be assigned, and what is there already is not changed by it.
            params.assign(params.value)
            assert run(params, moments, 1)[0] < 13.5
        else:
            assert look.sharding.mesh == mesh
"""
    )
    (tmp_path / "one").mkdir()
    (alone,) = succeeded(shared_pod(1, 4).run(tmp_path / "one", script))
    several = succeeded(shared_pod(2, 2).run(tmp_path, script))
    for name in (
        "replicated",
        "sharded",
        "on host",
        "on host, kept",
        "on host, split",
    ):
        expected = losses_of(alone, name)
        assert len(expected) == 6 and expected[-1] < expected[0]
        for rank in several:
            assert losses_of(rank, name) == pytest.approx(expected, rel=1e-5)
        assert {tuple(losses_of(rank, name)) for rank in several} == {
            tuple(losses_of(several[0], name))
        }


SAVED = ("sharded", "on host, split")
OVER_SAVED = f"""
with sc.Session(mesh):
    for name in {SAVED!r}:
        how = PLACEMENTS[name]
"""
SAVING = (
    TRAINING
    + OVER_SAVED
    + """
        params, moments = fresh(*how)
        if {steps}:
            say("losses", name + ":", run(params, moments, {steps}))
            sc.save("params " + name, value=params)
            sc.save("moments " + name, value=moments)
        else:
            sc.restore("params " + name, value=params)
            sc.restore("moments " + name, value=moments)
            assert params.version == 1
        say("losses", name + ":", run(params, moments, 3)) if not {steps} else None
"""
)


@pytest.fixture(scope="module")
def whole(shared_pod, tmp_path_factory):
    """One process that goes through all steps."""
    script = (
        TRAINING
        + OVER_SAVED
        + """
        say("losses", name + ":", run(*fresh(*how), 6))
"""
    )
    (whole,) = succeeded(shared_pod(1, 2).run(tmp_path_factory.mktemp("all"), script))
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_what_was_saved_goes_on_on_another_number_of_processes(
    shared_pod, whole, tmp_path, before, after
):
    succeeded(shared_pod(before).run(tmp_path, SAVING.replace("{steps}", "3")))
    restored = succeeded(shared_pod(after).run(tmp_path, SAVING.replace("{steps}", "0")))
    for name in SAVED:
        expected = losses_of(whole, name)[3:]
        assert losses_of(restored[0], name) == pytest.approx(expected, rel=1e-5)


def test_what_needs_the_whole_in_one_process_is_refused(shared_pod, tmp_path):
    script = """
    with sc.Session(mesh):
        try:
            sc.Variables(np.ones(8), placement=sc.OnHost(update="host"))
        except sc.VariablesError as error:
            say("refused", str(error).splitlines()[0])
    """
    for rank in succeeded(shared_pod(2).run(tmp_path, script)):
        assert len(rank.said("refused")) == 1


def test_all_processes_find_that_nothing_was_saved(shared_pod, tmp_path):
    script = """
    with sc.Session(mesh):
        try:
            sc.restore("saved", value=np.ones(8))
        except FileNotFoundError as error:
            say("starts", type(error).__name__)
    """
    for rank in succeeded(shared_pod(2).run(tmp_path, script)):
        assert rank.said("starts") == ["NoCheckpointError"]


TOGETHER = """
from pathlib import Path
import contextlib
session = sc.Session(mesh) if {inside} else contextlib.nullcontext()
split = NamedSharding(mesh, P("data"))
def values(scale):
    whole = np.full((4, 3), scale, np.float32)
    return jax.make_array_from_callback((4, 3), split, lambda index: whole[index])
with session:
    params = sc.Variables({{"w": values(1.0)}}, name="params")
    for step in (1, 2, 3):
        saving = sc.save("saves", params=params, plain=values(float(step)), numpy=np.ones(2),
                         local=jnp.full(2, step), step=step, keep=2, asynchronous=step > 1)
    saving.wait()
    if RANK == 0:
        Path("file").write_text("")
    try:
        sc.save("file", params=params)
    except sc.VariablesError as error:
        say("refused", "could not be written" in str(error))
    try:
        sc.save("saves", params=params, one=np.ones(2) if RANK == 0 else "no array", step=4)
    except sc.VariablesError as error:
        say("differs", "a leaf is not an array" in str(error))
    params.assign({{"w": values(0.0)}})
    found = sc.restore("saves", params=params, plain=values(0.0), numpy=np.zeros(2),
                       local=jnp.zeros(2, int), step=0)
    shards = [float(x) for tree in (params.value["w"], found["plain"])
              for shard in tree.addressable_shards for x in np.unique(shard.data)]
    say("restored", found["step"], *shards, found["local"], found["numpy"])
    say("left", *sorted(path.name for path in Path("saves").iterdir()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_several_things_are_saved_together(shared_pod, inside, tmp_path):
    for rank in succeeded(shared_pod(2).run(tmp_path, TOGETHER.format(inside=inside))):
        assert rank.said("refused") == rank.said("differs") == ["True"], rank.output
        assert rank.said("restored") == ["3 1.0 3.0 [3 3] [1. 1.]"], rank.output
        assert rank.said("left") == ["step_00000002 step_00000003"], rank.output


ALONE = """
def add(state, batch):
    return state + batch.mean(), batch.sum()
step = sc.step(add, carry="state", batch="batch")
try:
    with sc.Session(mesh, agree_timeout=4):
        state = sc.Variables(np.zeros(3, np.float32), name="state", placement=sc.{placement}())
        for number in range(8):
            state, total = step(state, np.ones(4, np.float32))
            float(total)
            if number == 3 and RANK == 0:
                started = time.monotonic()
                sc.save("alone", state=state)
except sc.AgreementError as error:
    say("refused", round(time.monotonic() - started), str(error).replace(chr(10), " "))
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["Replicated", "OnHost"])
def test_a_rank_that_saves_alone_is_told_so(placement, tmp_path):
    """Before it gathers what lies on the hosts, where it would wait for the others."""
    ranks = run_pod(tmp_path, ALONE.replace("{placement}", placement))
    seconds, said = ranks[0].said("refused")[0].split(" ", 1)
    assert 3 <= int(seconds) <= 6, ranks[0].output
    assert "rank 1 did not take part in the agreement on saving" in said
    assert "saves, which all processes have to do together" in said
    assert all(rank.code == 1 for rank in ranks) and not (tmp_path / "alone").exists()


PART = """
if RANK:
    part = jax.sharding.Mesh(np.array(jax.devices()[1:]), ("data",))
    with sc.Session(part, agree_timeout=4):
        state = sc.Variables(np.zeros(4, np.float32), name="state")
        for work in (sc.save, sc.restore):
            try:
                work("part", state=state)
            except sc.VariablesError as error:
                say("refused", str(error).replace(chr(10), " "))
"""


@pytest.mark.slow
def test_a_part_of_a_pod_cannot_save(tmp_path):
    """orbax would wait for all."""
    for rank in succeeded(run_pod(tmp_path, PART, count=3))[1:]:
        texts = rank.said("refused")
        assert len(texts) == 2, rank.output
        assert all("by all processes of a pod together" in text for text in texts)
        assert all("a session over ranks 1" in text for text in texts)
    assert not (tmp_path / "part").exists()


GUARDED = """
with sc.Session(mesh), jax.transfer_guard_host_to_device("disallow"):
    state = sc.Variables(np.zeros(5, np.float32), placement=sc.OnHost())
    state.assign(np.arange(5, dtype=np.float32))
say("value", *state.value)
"""


@pytest.mark.slow
def test_values_on_the_hosts_of_a_pod_are_placed_explicitly(tmp_path):
    """As `jax.device_put` does, which `jax.transfer_guard` allows."""
    for rank in succeeded(run_pod(tmp_path, GUARDED)):
        assert rank.said("value") == ["0.0 1.0 2.0 3.0 4.0"], rank.output
