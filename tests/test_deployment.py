"""`DeploymentConfig` says and computes what TF-slim's own tests of `model_deploy` expect."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepcache as sc
from tests.serving.servers import LocalServer

# Of slim's tests: the options, and the devices of the clones, the optimizer and the variables.
SLIM = {
    "defaults": ({}, ["GPU:0"], "", ""),
    "on the CPU": ({"clone_on_cpu": True}, ["CPU:0"], "", ""),
    "two clones": ({"num_clones": 2}, ["GPU:0", "GPU:1"], "", ""),
    "a host": ({"num_ps_tasks": 1}, ["GPU:0"], "/job:worker", "/job:ps"),
    "clones, a host": (
        {"num_clones": 2, "num_ps_tasks": 1},
        ["GPU:0", "GPU:1"],
        *("/job:worker", "/job:ps"),
    ),
    "replicas": (
        {"num_replicas": 2, "num_clones": 2, "num_ps_tasks": 2},
        ["GPU:0", "GPU:1"],
        *("/job:worker", "/job:ps"),
    ),
    "names": (
        {"num_ps_tasks": 1, "worker_job_name": "trainer", "ps_job_name": "store"},
        ["GPU:0"],
        *("/job:trainer", "/job:store"),
    ),
}


@pytest.mark.parametrize(("options", "clones", "worker", "ps"), SLIM.values(), ids=SLIM)
def test_devices_are_those_of_slim(options, clones, worker, ps):
    config = sc.DeploymentConfig(**options)
    assert config.slim_devices() == {
        **{f"clone_device({i})": f"{worker}/device:{name}" for i, name in enumerate(clones)},
        "optimizer_device()": f"{worker}/device:CPU:0",
        "inputs_device()": f"{worker}/device:CPU:0",
        "variables_device()": f"{ps}/device:CPU:0",
    }
    assert (config.worker_device, config.ps_device) == (worker, ps)
    scopes = [config.clone_scope(i) for i in range(config.num_clones)]
    assert scopes == ([""] if len(clones) == 1 else [f"clone_{i}" for i in range(len(clones))])
    for i in range(config.num_clones):  # The tests fake eight devices: device i is the i-th "GPU".
        assert config.clone_device(i) == jax.devices()[0 if config.clone_on_cpu else i]
    assert config.inputs_device() == config.optimizer_device() == jax.devices("cpu")[0]
    assert list(config.mesh.devices) == [config.clone_device(i) for i in range(len(clones))]
    if ps:  # A copy on the worker; a master copy elsewhere.
        assert config.caching_device() == sc.Read(cache="device")
        assert config.variables_device() == sc.Replicated()
    else:  # None, and the host's memory.
        assert config.caching_device() == sc.Read()
        assert config.variables_device() == sc.OnHost(update="host")


REFUSED = {
    "replicas without hosts": ({"num_replicas": 2}, "num_ps_tasks"),
    "no worker": ({"num_ps_tasks": 1, "worker_job_name": ""}, "worker_job_name"),
    "no ps": ({"num_replicas": 2, "num_ps_tasks": 1, "ps_job_name": None}, "ps_job_name"),
    "replica 1 of 1": ({"replica_id": 1}, "replica_id"),
    "replica 3 of 2": ({"replica_id": 3, "num_replicas": 2, "num_ps_tasks": 1}, "replica_id"),
    "no clone": ({"num_clones": 0}, "num_clones"),
    "half a clone": ({"num_clones": 0.5}, "num_clones"),
    "a replica before the first": ({"replica_id": -1}, "replica_id"),
}


@pytest.mark.parametrize(("options", "name"), REFUSED.values(), ids=REFUSED)
def test_options_are_checked_as_slim_does(options, name):
    with pytest.raises(sc.OptionError, match=name):
        sc.DeploymentConfig(**options)


@pytest.mark.parametrize("method", ["clone_device", "clone_scope"])
@pytest.mark.parametrize("index", [2, -1])
def test_there_is_no_such_clone(method, index):
    with pytest.raises(sc.OptionError, match="clone_index"):
        getattr(sc.DeploymentConfig(num_clones=2), method)(index)


def test_names_that_nothing_uses_may_be_missing():
    sc.DeploymentConfig(worker_job_name="", ps_job_name="")


def test_each_clone_needs_a_device():
    with pytest.raises(sc.PlacementError, match="at most 8"):
        sc.DeploymentConfig(num_clones=9).clone_device(0)
    assert sc.DeploymentConfig(num_clones=9, clone_on_cpu=True).mesh.size == 1


def classify(variables, batch, moving=None):
    """Slim's classifier: batch normalization with decay 0.1, one unit, and its log loss."""
    inputs, labels = batch
    mean, variance = inputs.mean(0), inputs.var(0)
    normalized = (inputs - mean) / jnp.sqrt(variance + 0.001) + variables["beta"]
    predicted = jax.nn.sigmoid(normalized @ variables["w"] + variables["b"])
    logs = labels * jnp.log(predicted + 1e-7) + (1 - labels) * jnp.log(1 - predicted + 1e-7)
    if moving is None:
        return -logs.mean(), predicted
    unbiased = variance * len(inputs) / (len(inputs) - 1)
    now = {"mean": mean, "variance": unbiased}
    return -logs.mean(), {name: 0.1 * moving[name] + 0.9 * now[name] for name in now}


@pytest.fixture
def data():
    """Slim's training set: 16 rows that tell their label by which of four inputs is set."""
    random = np.random.RandomState(0)
    inputs = np.zeros((16, 4), np.float32)
    labels = random.randint(0, 2, size=(16, 1)).astype(np.float32)
    for row in range(16):
        inputs[row, int(2 * labels[row, 0] + random.randint(0, 2))] = 1
    return inputs, labels


@pytest.fixture
def variables():
    w = np.random.RandomState(1).uniform(-1, 1, (4, 1)).astype(np.float32)
    return {"beta": np.zeros(4, np.float32), "w": w, "b": np.zeros(1, np.float32)}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("options", [{}, {"clone_on_cpu": True}], ids=["devices", "CPU"])
def test_training_ends_where_that_of_slim_does(options, data, variables):
    """Two clones, each with the whole set; SGD with rate 1; the first clone's moving averages."""
    config = sc.DeploymentConfig(num_clones=2, **options)
    model = config.deploy(classify, variables, optimizer=optax.sgd(1.0))
    batch = jax.tree.map(lambda each: np.concatenate([each, each]), data)
    moving = {"mean": np.zeros(4, np.float32), "variance": np.ones(4, np.float32)}
    initial_loss = model.total_loss(batch)
    for _ in range(10):
        _, outputs = model.train_op(batch, moving=moving)
        assert outputs["mean"].shape == (2, 4)
        moving = jax.tree.map(lambda each: np.asarray(each[0]), outputs)
    assert model.total_loss(batch) < initial_loss / 5
    np.testing.assert_allclose(moving["mean"], [0.125, 0.25, 0.375, 0.25], rtol=1e-5)
    expected = np.array([0.109375, 0.1875, 0.234375, 0.1875]) * 16 / 15
    np.testing.assert_allclose(moving["variance"], expected, rtol=1e-5)
    assert model.variables.version == 10
    assert model.train_step.stats().misses == 1, "one program for all calls"


def decay(variables):
    return 0.001 * jnp.sum(variables["w"] ** 2)


@pytest.mark.parametrize(
    ("num_clones", "on_cpu"), [(1, False), (4, False), (4, True)], ids=["one", "four", "CPU"]
)
def test_losses_are_averaged_gradients_summed_and_regularization_counts_once(
    num_clones, on_cpu, data, variables
):
    config = sc.DeploymentConfig(num_clones, on_cpu)
    parts = [
        jax.tree.map(lambda x, i=i: np.split(x, num_clones)[i], data) for i in range(num_clones)
    ]
    alone = jax.jit(jax.value_and_grad(classify, has_aux=True))
    computed = [alone(variables, part) for part in parts]
    how = {"regularization": decay}
    optimize = jax.jit(lambda v, batch: config.optimize_clones(classify, v, batch, **how))
    loss, gradients, outputs = optimize(variables, data)

    regular, slope = alone_decay(variables)
    expected = sum(np.float32(each) / num_clones for (each, _), _ in computed) + regular
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    slopes = [each for _, each in computed]
    summed = jax.tree.map(lambda own, *each: own + sum(each) / num_clones, slope, *slopes)
    for one, other in zip(*map(jax.tree.leaves, (gradients, summed)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(outputs, [each for (_, each), _ in computed], rtol=1e-5)
    devices = 1 if on_cpu else num_clones
    assert len(outputs.sharding.device_set) == devices, "each clone computes on its device"


def alone_decay(variables):
    w = variables["w"]
    return 0.001 * np.sum(w**2), {**jax.tree.map(np.zeros_like, variables), "w": 0.002 * w}


def test_without_an_optimizer_a_model_is_only_evaluated(data, variables):
    model = sc.DeploymentConfig(2).deploy(classify, variables, regularization=decay)
    halves = [classify(variables, [each[i : i + 8] for each in data])[0] for i in (0, 8)]
    expected = np.mean(halves) + decay(variables)
    np.testing.assert_allclose(model.total_loss(data), expected, rtol=1e-5)
    with pytest.raises(sc.OptionError, match="optimizer"):
        model.train_op(data)


def test_clones_have_names_devices_numbers_and_share_scalars():
    def numbered(variables, batch):
        return variables * batch["rate"], jax.lax.axis_index("clones") + batch["x"]

    config = sc.DeploymentConfig(4)
    clones = config.create_clones(numbered, 2.0, {"rate": np.float32(3), "x": np.zeros(8, int)})
    assert [each.outputs.tolist() for each in clones] == [[i, i] for i in range(4)]
    assert [float(each.loss) for each in clones] == [6.0] * 4
    assert [each.scope for each in clones] == ["clone_0", "clone_1", "clone_2", "clone_3"]
    assert [each.device for each in clones] == jax.devices()[:4]


def test_bad_batches_and_losses_are_refused(data, variables):
    config = sc.DeploymentConfig(3)
    with pytest.raises(sc.PlacementError, match=r"multiple of num_clones=3"):
        config.create_clones(classify, variables, data)
    with pytest.raises(sc.OptionError, match="a scalar"):
        config.create_clones(lambda variables, batch: batch, variables, np.zeros(6))


@pytest.mark.slow
def test_replicas_train_what_a_host_serves(data, variables, tmp_path):
    server = LocalServer(tmp_path / "server").start()
    try:
        common = {"num_clones": 2, "num_replicas": 2, "num_ps_tasks": 1}
        models = []
        for replica in range(2):
            config = sc.DeploymentConfig(replica_id=replica, **common)
            with pytest.raises(sc.OptionError, match="number of hosts"):
                config.deploy(classify, variables)
            how = {"optimizer": optax.sgd(0.5), "server": server.connect()}
            models.append(config.deploy(classify, variables, **how))
        first = float(models[0].total_loss(data))
        for _ in range(5):
            for model in models:
                model.train_op(data)
        assert [model.variables.version for model in models] == [9, 10], "each sees its own last"
        losses = [float(model.total_loss(data)) for model in models]
        assert losses[0] == losses[1] < first, "and both read the newest"
    finally:
        server.stop()
