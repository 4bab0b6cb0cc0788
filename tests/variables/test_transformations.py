"""Variables inside JAX's transformations, where a value that is read would stay for good."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import LARGE

import stepcache as sc

X = np.ones(4, np.float32)


def table(**options):
    tree = {"large": np.full(LARGE, 2, np.float32), "a": np.float32(3)}
    return sc.Variables(tree, name="table", **options)


READERS = {
    "a step that closes over them": lambda v: sc.step(lambda x: x * v.value["a"]),
    "a step with a carry that closes over them": lambda v: sc.step(
        lambda state: state * v.value["a"], carry="state"
    ),
    "jit": lambda v: jax.jit(lambda x: x * v.value["a"]),
    "grad": lambda v: jax.grad(lambda x: (x * v.value["a"]).sum()),
    "vmap": lambda v: jax.vmap(lambda x: x * v.value["a"]),
    "scan": lambda v: lambda x: jax.lax.scan(lambda c, y: (c + v.value["a"], y), x, x),
    "make_jaxpr": lambda v: jax.make_jaxpr(lambda x: x * v.value["a"]),
    "checkpoint": lambda v: jax.checkpoint(lambda x: x * v.value["a"]),
}


@pytest.mark.parametrize("placement", [sc.Replicated(), sc.OnHost()], ids=str)
@pytest.mark.parametrize("reader", READERS)
def test_a_value_that_is_read_inside_a_transformation_is_an_error(reader, placement):
    variables = table(placement=placement)
    with pytest.raises(sc.VariablesError, match="constant") as raised:
        READERS[reader](variables)(jnp.asarray(X))
    assert raised.value.where == "table"
    assert "argument of the step" in raised.value.hint and ".value" in raised.value.hint
    assert float(variables.value["a"]) == 3


def scaled(x, table):
    return (x * table["a"] + table["large"].sum()).sum()


CALLERS = {
    "jit": jax.jit,
    "grad": jax.grad,
    "vmap": jax.vmap,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0.0, x),
    "another step": sc.step,
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_step_that_reads_variables_is_not_called_inside_a_transformation(caller, by_keyword):
    variables, step = table(), sc.step(scaled)
    given = {"table": {"inner": variables}} if by_keyword else {"table": variables}
    step = sc.step(lambda x, table: scaled(x, table["inner"])) if by_keyword else step
    before = float(step(X, **given))
    with pytest.raises(sc.VariablesError, match="inside another transformation") as raised:
        CALLERS[caller](lambda x: step(x, **given))(X)
    assert "scaled" in raised.value.where or "lambda" in raised.value.where
    assert "table" in raised.value.got and ".value" in raised.value.hint
    variables.assign({"large": np.zeros(LARGE, np.float32), "a": np.float32(5)})
    assert float(step(X, **given)) == 20 != before


def test_the_way_out_sees_each_update():
    """What the errors' hints say: the value as an argument of what is transformed."""
    variables = table()
    inner = jax.jit(lambda x, value: scaled(x, value))
    step = sc.step(lambda x, table: jax.grad(lambda x: scaled(x, table))(x))
    for a in (3, 5):
        variables.assign({"large": np.zeros(LARGE, np.float32), "a": np.float32(a)})
        assert float(inner(X, variables.value)) == 4 * a
        assert step(X, variables).tolist() == [a] * 4


def test_variables_that_are_carried_are_an_error_inside_a_transformation():
    variables = sc.Variables({"w": np.ones(3, np.float32)}, name="table")
    step = sc.step(lambda state, x: (state, (state["w"] * x).sum()), carry="state")
    x = np.ones(3, np.float32)
    for transformed in (
        jax.jit(lambda x: step(variables, x)[1]),
        jax.grad(lambda x: step(variables, x)[1]),
        jax.vmap(lambda x: step(variables, x)[1]),
        sc.step(lambda x: step(variables, x)[1]),
    ):
        with pytest.raises(sc.VariablesError, match="carried inside") as raised:
            transformed(x)
        assert "table" in raised.value.got and ".value" in raised.value.hint
    assert variables.version == 0
    step(variables, x)
    assert variables.version == 1


def test_eval_shape_keeps_its_trace_for_jit():
    """Why a value is not read there either: the same function under jit would use that trace."""
    kept = [1.0]

    def read(x):
        return x * kept[0]

    jax.eval_shape(read, 1.0)
    kept[0] = 2.0
    assert float(jax.jit(read)(1.0)) == 1.0
    variables = table()
    with pytest.raises(sc.VariablesError, match="constant"):
        jax.eval_shape(lambda x: x * variables.value["a"], 1.0)
    assert jax.eval_shape(lambda x, value: x * value["a"], 1.0, variables.value).shape == ()
    assert sc.step(scaled).eval_shape(X, variables).shape == ()


@pytest.mark.parametrize("placement", [sc.Replicated(), sc.OnHost()], ids=str)
def test_a_value_is_read_where_it_does_not_stay(placement):
    variables = table(placement=placement)
    step = sc.step(scaled)

    @jax.jit
    def at_compile_time(x):
        with jax.ensure_compile_time_eval():
            return x * float(variables.value["a"]) + float(step(X, variables))

    expected = float(step(X, variables))
    assert at_compile_time(0.0) == expected
    with jax.disable_jit():
        for a in (3, 5):
            variables.assign({"large": np.zeros(LARGE, np.float32), "a": np.float32(a)})
            assert float(jax.jit(lambda x: x * variables.value["a"])(1.0)) == a
            assert float(jax.grad(lambda x: x * variables.value["a"])(1.0)) == a
            assert jax.grad(lambda x: step(x, variables))(X).tolist() == [a] * 4


@pytest.mark.parametrize("placement", [sc.Replicated(), sc.OnHost()], ids=str)
def test_without_jit_a_step_sees_the_arrays_of_jax(placement):
    variables = table(placement=placement)
    step = sc.step(lambda x, table: x * table["a"].at[()].set(2.0))
    with jax.disable_jit():
        assert float(step(3.0, variables)) == 6
        assert float(jax.grad(lambda x: step(x, variables))(3.0)) == 2


ARRAY_USES = {
    "an argument of jit": lambda v: jax.jit(lambda x: x)(v),
    "a closed-over leaf": lambda v: jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * x, v))(1.0),
    "on the left": lambda v: jax.jit(lambda x: v + x)(1.0),
    "on the right": lambda v: jax.jit(lambda x: x + v)(1.0),
    "jnp": lambda v: jax.jit(lambda x: jnp.sum(v))(1.0),
    "an inner jit": lambda v: jax.jit(lambda x: jax.jit(jnp.sin)(v))(1.0),
    "returned": lambda v: jax.jit(lambda x: v)(1.0),
    "returned by a step": lambda v: sc.step(lambda x: v)(1.0),
    "eagerly": lambda v: jnp.ones(3) + v,
    "an argument of grad": lambda v: jax.grad(lambda x: x)(v),
}


@pytest.mark.parametrize("use", ARRAY_USES)
def test_variables_in_the_place_of_an_array_are_an_error_of_ours(use):
    with pytest.raises(sc.VariablesError, match="not an array") as raised:
        ARRAY_USES[use](table())
    assert raised.value.where == "table"
    assert "argument of a step" in raised.value.hint and ".value" in raised.value.hint
