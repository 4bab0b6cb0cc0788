"""Where the state of an optimizer is placed: beside the parameters that it belongs to."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import stepcache as sc

PARAMS = {
    "w": np.ones((16, 32), np.float32),
    "layer": {"w": np.ones((32, 8), np.float32), "b": np.ones(8, np.float32)},
}
RULES = [("^params/w", P("data", "model")), ("w$", P("model")), ("b$", P("data"))]
OF_W, OF_LAYER_W, OF_B = P("data", "model"), P("model"), P("data")
PARTS = {"w": "adam", "layer": {"w": "momentum", "b": "adam"}}
MOMENTS = {
    "mu/w": OF_W,
    "mu/layer/w": OF_LAYER_W,
    "mu/layer/b": OF_B,
    "nu/w": OF_W,
    "nu/layer/w": OF_LAYER_W,
    "nu/layer/b": OF_B,
}
SMALL = optax.adafactor(1e-3, min_dim_size_to_factor=8)
OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), MOMENTS),
    "adafactor": (SMALL, {"v/layer/b": OF_B, "v_row/w": P(), "v_col/layer/w": P(), "v/w": P()}),
    "multi_transform": (
        optax.multi_transform(
            {"adam": optax.adam(1e-3), "momentum": optax.sgd(0.1, momentum=0.9)}, PARTS
        ),
        {"mu/w": OF_W, "trace/layer/w": OF_LAYER_W, "nu/layer/b": OF_B},
    ),
    "masked": (
        optax.masked(optax.adam(1e-3), {"w": True, "layer": {"w": False, "b": True}}),
        {"mu/w": OF_W, "nu/layer/b": OF_B},
    ),
    "chain": (
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-3, 10))
        ),
        MOMENTS | {"1/1/count": P()},
    ),
}


def meshes(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def specs(variables):
    """The specs of the state, by path, without the dimensions that they do not split."""
    found = {}
    for slot in variables._updates.state.layout.slots:
        spec = list(slot.sharding.spec)
        while spec and spec[-1] is None:
            spec.pop()
        found[slot.path] = P(*spec)
    return found


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, AxisType.Auto) for name in OPTIMIZERS), ("adafactor", AxisType.Explicit)],
)
def test_moments_lie_as_their_parameters(name, kind):
    optimizer, wanted = OPTIMIZERS[name]
    with sc.Session(meshes(kind)):
        write = sc.Write(mode="apply", optimizer=optimizer)
        variables = sc.Variables(PARAMS, placement=sc.Sharded(RULES), write=write, name="params")
        for _ in range(2):
            variables.push(PARAMS)
        found = specs(variables)
        for end, spec in wanted.items():
            (path,) = (path for path in found if f"/{path}".endswith(f"/{end}"))
            assert found[path] == spec, path
        assert all(spec == P() for path, spec in found.items() if path.endswith("count"))
    value, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(2):
        updates, state = optimizer.update(PARAMS, state, value)
        value = optax.apply_updates(value, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), variables.value, value
    )


def pushed(rules, optimizer, placement=None, session_rules=(), params=PARAMS, name="params"):
    with sc.Session(meshes(AxisType.Auto), rules=session_rules):
        placement = placement or sc.Sharded(rules)
        write = sc.Write(mode="apply", optimizer=optimizer)
        variables = sc.Variables(params, placement=placement, write=write, name=name)
        variables.push(params)
        return specs(variables)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("rules", [RULES, [("^params/", P("data"))]])
@pytest.mark.parametrize("placed", ["on the host", "by the session"])
def test_state_of_other_placements_lies_as_its_parameters(rules, placed):
    placement = sc.Replicated() if placed == "by the session" else sc.OnHost(sc.Sharded(rules))
    found = pushed(rules, optax.adam(0.1), placement, rules)
    assert found["0/mu/w"] == found["0/nu/w"] == rules[0][1] and found["0/count"] == P()


def test_rules_of_the_state_alone_are_asked_first():
    rules = [("optimizer/.*(mu|nu)/w", P("data")), ("optimizer/.*v_row/w", P("model"))]
    found = pushed(rules, optax.adam(0.1))
    assert found["0/mu/w"] == P("data") and found["0/mu/layer/w"] == P()
    rules.append(("w$", P(None, "model")))
    found = pushed(rules, optax.chain(optax.adam(0.1), SMALL))
    assert found["0/0/mu/w"] == P("data") and found["0/0/mu/layer/w"] == P(None, "model")
    assert found["1/0/v_row/w"] == P("model") and found["1/0/v_col/w"] == P()
    with pytest.raises(sc.PlacementError, match="params/optimizer/weights_memory"):
        pushed([("weights_memory|w$", P("data"))], optax.scale_by_lbfgs())


def test_a_parameter_alone_has_its_moments_beside_it():
    found = pushed([("^table", P("data"))], optax.adam(0.1), params=PARAMS["w"], name="table")
    assert found["0/mu"] == found["0/nu"] == P("data") and found["0/count"] == P()
