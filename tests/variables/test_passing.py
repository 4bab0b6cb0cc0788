"""Where `Variables` can stand in a call, and what comes back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import assert_same, copied
from flax.training.train_state import TrainState
from states import LARGE, Point, X, advance, number, ramp, tree_of

import stepcache as sc
from stepcache import jaxcompat

N = LARGE[0]


def double(state, other=None, *, more=None):
    """Reads whatever it is given, and returns it beside its carry."""
    return jax.tree.map(lambda leaf: leaf * 2, state), (other, more)


def test_reading_changes_nothing():
    step, state, read = (
        sc.step(double, carry="state"),
        sc.Variables(tree_of(1)),
        sc.Variables(tree_of(5)),
    )
    for _ in range(3):
        state, (other, _) = step(state, read)
        assert number(other) == 5
    assert (number(read.value), read.version) == (5, 0)
    assert (number(state.value), state.version) == (8, 3)


def test_a_step_without_a_carry_reads():
    read = sc.step(lambda state: jax.tree.map(lambda leaf: leaf * 2, state))
    variables = sc.Variables(tree_of(1))
    for _ in range(3):
        assert number(read(variables)) == 2
    assert (number(variables.value), variables.version) == (1, 0)


def test_in_containers_beside_plain_arrays_and_by_keyword():
    step = sc.step(double, carry="state")
    one, two, three = (sc.Variables(tree_of(n)) for n in (1, 2, 3))
    mixed = {"v": two, "plain": np.ones(3, np.float32), "none": None}
    state, (other, more) = step(one, mixed, more=(three, 7))
    assert state is one
    assert number(other["v"]) == 2 and number(other["plain"]) == 1 and other["none"] is None
    assert number(more[0]) == 3 and more[1] == 7
    state, (other, more) = step(state=one, other=mixed, more=[three, two])
    assert number(one.value) == 4
    assert [number(tree) for tree in more] == [3, 2]


def test_the_same_variables_more_than_once():
    step = sc.step(double, carry="state")
    one, two = sc.Variables(tree_of(1)), sc.Variables(tree_of(2))
    state, (other, more) = step(one, one, more=one)
    assert state is one and number(one.value) == 2 and one.version == 1
    assert number(other) == number(more) == 1, "what is read is what was there before"
    _, (other, more) = step(one, {"x": two, "y": two}, more=two)
    assert number(other["x"]) == number(other["y"]) == number(more) == 2
    assert (number(two.value), two.version) == (2, 0)
    _, (_, more) = step(one, two, more=tree_of(9))
    assert number(more) == 9
    assert step.stats().compiles == 3


def test_each_place_has_a_tree_of_its_own():
    """As with plain trees: a function that changes one does not change the others."""

    @sc.step(carry="state")
    def step(state, before):
        state["a"] = state["a"] + 1
        return state, before["a"]

    variables = sc.Variables({"a": np.zeros(2, np.float32)})
    _, before = step(variables, variables)
    assert number(before) == 0 and number(variables.value) == 1


def test_two_carries():
    @sc.step(carry=("params", "moments"))
    def step(params, x, moments):
        new = jax.tree.map(lambda p, m: p + m, params, moments)
        return new, jax.tree.map(lambda m: m * 2, moments), x.sum()

    params, moments = sc.Variables(tree_of(1)), sc.Variables(tree_of(1))
    for _ in range(3):
        new_params, new_moments, _ = step(params, X, moments)
        assert new_params is params and new_moments is moments
    assert (number(params.value), number(moments.value)) == (8, 8)
    assert params.version == moments.version == 3
    plain = tree_of(1)
    new_params, plain, _ = step(params, X, plain)
    assert new_params is params and number(params.value) == 9 and number(plain) == 2


def test_a_carry_that_holds_variables_and_plain_arrays():
    @sc.step(carry="state")
    def step(state, x):
        return jax.tree.map(lambda leaf: leaf + 1, state), x.sum()

    one, two = sc.Variables(tree_of(1)), sc.Variables(tree_of(2))
    state = {"one": one, "n": jnp.zeros((), jnp.int32), "more": [two, np.ones(2, np.float32)]}
    for _ in range(3):
        state, total = step(state, X)
        assert state["one"] is one and state["more"][0] is two
        np.testing.assert_allclose(total, X.sum(), rtol=1e-6)
    assert (number(one.value), number(two.value), int(state["n"])) == (4, 5, 3)
    assert number(state["more"][1]) == 4 and one.version == two.version == 3


@pytest.mark.parametrize(
    "form",
    [
        lambda new: new,
        lambda new: (new,),
        lambda new: [new, 1],
        lambda new: (new, {"loss": 1}, None),
        lambda new: [new, [new["a"]]],
    ],
)
def test_outputs_have_the_form_that_the_step_gives_them_call_after_call(form):
    step = sc.step(lambda x, state: form(jax.tree.map(lambda a: a + x, state)), carry="state")
    plain, variables = tree_of(0), sc.Variables(tree_of(0))
    for count in range(1, 4):
        expected, outputs = step(1.0, plain), step(1.0, variables)
        plain = expected if isinstance(expected, dict) else expected[0]
        assert type(outputs) is (sc.Variables if expected is plain else type(expected))
        assert (outputs if expected is plain else outputs[0]) is variables
        if expected is not plain:
            assert_same(list(expected[1:]), list(outputs[1:]))
        assert variables.version == count and number(variables.value) == count
        plain = jax.tree.map(jnp.copy, plain)


def test_a_call_that_is_not_like_the_one_before():
    step = sc.step(double, carry="state")
    one, two, three = (sc.Variables(tree_of(n)) for n in (1, 2, 3))
    plain = np.ones(3, np.float32)
    step(one, plain)
    step(one, plain)
    assert number(step(one, three)[1][0]) == 3
    assert number(step(one, one)[1][0]) == 8
    assert number(step(one, {"x": one})[1][0]) == 16
    assert number(step(one, plain, more=two)[1][1]) == 2
    assert step(two, plain)[0] is two and step(one, plain)[0] is one
    assert number(step(tree_of(5), plain)[0]) == 10
    assert number(step(tree_of(5), one)[1][0]) == 128
    assert number(step({"a": one}, plain)[0]["a"].value) == 256
    step(state=one, other=plain)
    step(one)
    values = [(number(each.value), each.version) for each in (one, two, three)]
    assert values == [(1024, 10), (4, 1), (3, 0)]
    with pytest.raises(TypeError):
        step(one, plain, plain)
    with pytest.raises(TypeError):
        step()
    assert one.version == 10


@pytest.mark.parametrize("kind", [dict, tuple, Point])
def test_a_step_that_returns_its_carry_alone(kind):
    tree = {dict: tree_of(1), tuple: (np.ones(2, np.float32),) * 2, Point: Point(X, X)}[kind]
    step = sc.step(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), carry="state")
    expected = step(copied(tree))
    variables = sc.Variables(tree)
    assert step(variables) is variables
    assert_same(expected, variables.value)
    both = sc.step(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), carry="state")
    mixed = both({"v": variables, "x": np.zeros(2, np.float32)})
    assert mixed["v"] is variables and variables.version == 2 and number(mixed["x"]) == 1


def test_in_the_rest_of_the_arguments():
    @sc.step(carry="state")
    def step(state, *rest, scale=1, **more):
        read = [*rest, *(more[name] for name in sorted(more))]
        return jax.tree.map(lambda leaf: leaf * scale, state), read

    one, two, three = (sc.Variables(tree_of(n), name=f"v{n}") for n in (1, 2, 3))
    _, read = step(one, two, tree_of(9), three, scale=2, x=two, y=tree_of(8))
    assert [number(each) for each in read] == [2, 9, 3, 2, 8]
    assert number(one.value) == 2
    explanation = step.explain(one, two, tree_of(9), three, scale=2, x=two, y=tree_of(8))
    assert explanation.hit
    assert "rest/0 and x: Variables('v2'" in str(explanation).replace("\n", " ")
    assert "buffers/" not in str(explanation)


def test_the_carry_by_keyword_alone():
    @sc.step(carry="state")
    def step(x, /, y, *, state):
        return jax.tree.map(lambda leaf: leaf + y, state), x

    variables = sc.Variables(tree_of(0))
    for _ in range(3):
        assert step(1, y=2.0, state=variables)[0] is variables
    assert number(variables.value) == 6


def test_inside_a_train_state():
    params = {"w": np.ones(3, np.float32), "b": np.zeros((), np.float32)}

    def make(params):
        def apply(params, x):
            return ((params["w"] * x).sum() + params["b"]) ** 2

        state = TrainState.create(apply_fn=apply, params=params, tx=optax.adam(0.1))
        return state.replace(step=jnp.int32(0))

    def train_step(state, x):
        loss, gradients = jax.value_and_grad(state.apply_fn)(state.params, x)
        return state.apply_gradients(grads=gradients), loss

    variables = sc.Variables(params)
    state, plain = make(params), make(params)
    state = state.replace(params=variables)
    step, plain_step = sc.step(train_step, carry="state"), sc.step(train_step, carry="state")
    for _ in range(3):
        state, loss = step(state, np.float32(2))
        plain, expected = plain_step(plain, np.float32(2))
        assert state.params is variables and float(loss) == float(expected)
    assert_same(plain.params, variables.value)
    assert_same(plain.opt_state, state.opt_state)


def test_a_class_that_refuses_to_be_built_around_anything_but_arrays():
    @jax.tree_util.register_pytree_with_keys_class
    class Strict:
        def __init__(self, a, b):
            assert a.ndim == b.ndim == 1, "no vectors"
            self.a, self.b = a, b

        def tree_flatten_with_keys(self):
            keys = jax.tree_util.GetAttrKey
            return ((keys("a"), self.a), (keys("b"), self.b)), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    def step_of(change):
        return sc.step(lambda state: {"s": change(state["s"])}, carry="state")

    variables = sc.Variables({"s": Strict(ramp(3), ramp(4))})
    step = step_of(lambda s: Strict(s.a + 1, s.b))
    step(variables)
    assert variables.value["s"].a[0] == ramp(3)[0] + 1
    if jaxcompat.PRIVATE_API:  # JAX's public stages build trees around objects of their own.
        step.warm(variables)
        assert step.explain(variables).hit
    with pytest.raises(sc.CarryError, match=r"float32\[2\]") as raised:
        step_of(lambda s: Strict(s.a[:2], s.b))(variables)
    assert raised.value.where == "state['s'].a"
    with pytest.raises(sc.CarryError, match="carry"):
        step_of(lambda s: s.a)(variables)
    assert variables.version == 1


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A class that gives two children one key."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("x"), each) for each in self.children], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_leaves_of_one_path_are_carried():
    step = sc.step(lambda twins: Twins(*(each + 1 for each in twins.children)), carry="twins")
    twins = Twins(np.zeros(2, np.float32), np.ones(3, np.float32))
    variables = sc.Variables(twins)
    for _ in range(2):
        twins, _ = step(twins), step(variables)
    assert_same(twins, variables.value)
    assert twins.children[1].tolist() == [3] * 3


def test_calls_that_jax_has_to_serve_itself():
    step = sc.step(lambda state, x: (jax.tree.map(advance, state), x), carry="state")
    variables = sc.Variables({"key": jax.random.key(0), "w": [ramp(3), ramp(4)]})
    plain, before = variables.value, step.stats().delegated
    with jax.debug_key_reuse(True):
        for _ in range(3):
            variables, _ = step(variables, 1.0)
    assert step.stats().delegated == before + 3
    for _ in range(3):
        plain, _ = step(plain, 1.0)
    assert_same(plain, variables.value)


def test_static_arguments_beside_them():
    @sc.step(carry="state", static_argnames=("scale", "names"))
    def step(state, x, scale=2, names=("a",)):
        return {**state, **{name: state[name] * scale for name in names}}, x.sum()

    variables = sc.Variables(tree_of(1))
    step(variables, X)
    step(variables, X, scale=3, names=("a", "b"))
    step(variables, X, 3, ("a", "b"))
    assert number(variables.value["a"]) == 18 and number(variables.value["b"]) == 9
    assert variables.version == 3


def test_the_last_batch_of_another_size():
    @sc.step(carry="state")
    def step(state, x):
        return jax.tree.map(lambda leaf: leaf + x.sum(), state), x.shape[0]

    variables = sc.Variables(tree_of(0))
    for size in (4, 4, 3, 4, 3):
        variables, seen = step(variables, np.ones(size, np.float32))
        assert int(seen) == size
    assert number(variables.value) == 18 and step.stats().compiles == 2
    assert "x: float32[4] → float32[3] (axis 0)" in str(step.last_miss)


def test_a_step_as_a_method_and_one_over_a_partial():
    class Trainer:
        rate = 2.0

        @sc.step(static_argnames="self", carry="state")
        def train(self, state, x):
            return jax.tree.map(lambda leaf: leaf * self.rate, state), x.sum()

    variables = sc.Variables(tree_of(1))
    assert Trainer().train(variables, X)[0] is variables and number(variables.value) == 2
    step = sc.step(functools.partial(double, more=None), carry="state")
    assert step(variables, X)[0] is variables and number(variables.value) == 4


# ---- what a miss says -------------------------------------------------------------------------


def changes(miss):
    return [str(change) for change in miss.changes]


def ones(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"w": ones(3)}, {"w": ones(4)}, ["state['w']: float32[3] → float32[4] (axis 0)"]),
        (
            {"w": ones(3), "b": ones(2)},
            {"w": ones(3), "b": ones(5)},
            ["state['b']: float32[2] → float32[5] (axis 0)"],
        ),
        (
            {"large": ramp(LARGE), "b": ones(2)},
            {"large": ramp((1, *LARGE)), "b": ones(2)},
            [f"state['large']: float32[{N},64] → float32[1,{N},64] (2 → 3 dimensions)"],
        ),
        (
            {"w": ones(3), "b": ones(2)},
            {"w": ones(3).astype(np.int32), "b": ones(2)},
            ["state['w']: float32[3] → int32[3] (dtype)"],
        ),
        (
            Point(ones(3), [ones(2)]),
            Point(ones(3), [ones(2), ones(1)]),
            ["state.y[1]: absent → float32[1] (added)"],
        ),
        (
            {"w": ones(3), "b": ones(2)},
            {"w": ones(3), "c": ones(2)},
            [
                "state['c']: absent → float32[2] (added)",
                "state['b']: float32[2] → absent (missing)",
            ],
        ),
        pytest.param(
            {"w": [ones(3), ones(2)]},
            {"w": (ones(3), ones(2))},
            ["state['w']: <class 'list'> → <class 'tuple'> (their Python types differ)"],
            marks=pytest.mark.skipif(not jaxcompat.PRIVATE_API, reason="JAX does not say where"),
        ),
    ],
)
def test_a_miss_names_the_leaves_of_variables(before, after, expected):
    step = sc.step(lambda state, x: (state, x), carry="state")
    step(sc.Variables(before), 1.0)
    misses = [step.explain(sc.Variables(after), 1.0).miss]
    types = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (before, after)]
    if types[0] != types[1]:  # Else the two have the same module, which is not compiled again.
        with sc.no_recompile(), pytest.raises(sc.RecompileError) as raised:
            step(sc.Variables(after), 1.0)
        misses.append(raised.value.miss)
    step(sc.Variables(after), 1.0)
    assert [changes(miss) for miss in (*misses, step.last_miss)] == [expected] * (len(misses) + 1)


def test_a_miss_names_leaves_wherever_variables_stand():
    step = sc.step(double, carry="state")
    one, two = sc.Variables(tree_of(1)), sc.Variables(tree_of(2))
    other = sc.Variables({"a": ones(3), "b": ones(2, 3)})

    def missed(*args, **kwargs):
        step(*args, **kwargs)
        return changes(step.last_miss)

    step(one, {"x": two}, more=[two, 7])
    assert missed(one, {"x": other}, more=[other, 7]) == [
        f"{place}['b']: float32[2,2] → float32[2,3] (axis 1)" for place in ("other['x']", "more[0]")
    ]
    assert missed(one, {"x": one}, more=[two, 7]) == [
        "other: Variables → the Variables of state",
        "more: the Variables of other['x'] → Variables",
    ]
    assert missed(tree_of(1), {"x": two}, more=[two, 7]) == ["state: Variables → arrays"]
    assert missed(tree_of(1), {"x": tree_of(2)}, more=[two, 7]) == [
        "other: Variables → arrays",
        "more: the Variables of other['x'] → Variables",
    ]


def test_a_miss_says_that_a_value_of_variables_has_moved():
    step = sc.step(double, carry="state")
    variables = sc.Variables(tree_of(1))
    for x in (X, jax.device_put(X, jax.devices()[3])):
        step(variables, x)
    moved = "uncommitted → float32[{0}] @ cpu:3 (committed)"
    assert changes(step.last_miss)[:2] == [
        f"state['{name}']: float32[{shape}] {moved.format(shape)}"
        for name, shape in (("a", "3"), ("b", "2,2"))
    ]
    step(variables, x)  # What a call returns is where its committed arguments are.
    assert step.stats().misses == 2
