"""Optimizers of served variables: which are the same, and what happens where another is given."""

import warnings

import jax
import numpy as np
import optax
import pytest

import stepcache as sc
from stepcache.errors import OptimizerWarning, OptionError, VariablesError
from stepcache.link import plain
from stepcache.serving import optimizers
from stepcache.serving.optimizers import ExportedRule, differ, export_rule

TREE = {"b": np.zeros(2, np.float32), "w": np.ones(3, np.float32)}
GRADIENTS = {"b": np.full(2, 0.5, np.float32), "w": np.full(3, -0.2, np.float32)}
RATES = np.linspace(0.1, 0.2, 1000, dtype=np.float32)


def exported(optimizer):
    leaves, structure = jax.tree.flatten(TREE)
    return export_rule("params", optimizer, structure, leaves)


def scheduled(place=0, more=0.0):
    rates = RATES.copy()
    rates[place] += more
    return optax.sgd(lambda count: jax.numpy.asarray(rates)[count])


# ---- identities ----------------------------------------------------------------------------------

SCRIPT = """
import jax, optax
def squares(updates, state, params=None):
    return jax.tree.map(lambda leaf: leaf * leaf, updates), state
optimizer = optax.chain(optax.GradientTransformation(lambda params: (), squares), optax.adam(0.1))
"""


def test_lines_that_move_make_no_other_optimizer():
    found = []
    for name, source in (("first.py", SCRIPT), ("second.py", "\n# A comment.\n\n" + SCRIPT)):
        names = {}
        exec(compile(source, name, "exec"), names)
        found.append(exported(names["optimizer"]))
    assert found[0] != found[1], "programs have the lines that they come from"
    first, second = (ExportedRule(each).identity for each in found)
    assert first == second and jax.__version__ in first
    assert ".py" not in optimizers._LOCATIONS.sub("", _text(found[1]))


def _text(sent):
    return jax.export.deserialize(bytearray(plain.unpack(sent)[2])).mlir_module()


@pytest.mark.parametrize(
    "one, other",
    [
        (optax.adam(1e-3), optax.adam(1.0001e-3)),
        (optax.adam(1e-3), optax.sgd(1e-3)),
        (scheduled(), scheduled(500, 0.1)),
        (optax.adagrad(0.1), optax.adagrad(0.1, initial_accumulator_value=0.2)),
        (optax.inject_hyperparams(optax.sgd)(0.1), optax.inject_hyperparams(optax.sgd)(0.2)),
    ],
    ids=["rate", "algorithm", "schedule", "initial state", "rate in the state"],
)
def test_other_optimizers_differ(one, other):
    first, again, second = (ExportedRule(exported(each)).identity for each in (one, one, other))
    assert first == again and not differ(first, again)
    assert first != second and differ(first, second)


def test_programs_of_other_versions_are_not_compared(monkeypatch):
    first = exported(optax.sgd(0.1))
    monkeypatch.setattr(jax, "__version__", "0.1.2")
    other = ExportedRule(exported(optax.sgd(0.2))).identity
    without = ExportedRule(plain.pack(plain.unpack(first)[:3]))
    assert without.identity == "" and without.init(jax.tree.leaves(TREE)) is not None
    for identity in (other, ""):
        assert not differ(ExportedRule(first).identity, identity)
        assert not differ(identity, ExportedRule(first).identity)


# ---- another optimizer than the stored one -------------------------------------------------------


def opened(connection, name, optimizer, **options):
    write = sc.Write(mode="apply", optimizer=optimizer)
    return connection.variables(name, TREE, write=write, **options)


def check(params, steps):
    """The variables are as after these steps of optax, each an optimizer that keeps the state."""
    value, state = TREE, None
    for optimizer in steps:
        state = optimizer.init(value) if state is None else state
        updates, state = optimizer.update(GRADIENTS, state, value)
        value = optax.apply_updates(value, updates)
    for path, leaf in params.value.items():
        np.testing.assert_allclose(leaf, value[path], rtol=1e-5)


def test_another_optimizer_warns_and_the_stored_one_goes_on(connection, name, caplog):
    stored = optax.adam(0.1)
    first = opened(connection, name, stored)
    with warnings.catch_warnings(action="error"):
        opened(connection, name, optax.adam(0.1))
        opened(connection, name, stored, replace_optimizer=True)
    with pytest.warns(OptimizerWarning, match="replace_optimizer=True") as seen:
        second = opened(connection, name, optax.adam(0.2))
    assert name in str(seen[0].message) and seen[0].filename == __file__
    assert [each.name for each in caplog.records if name in each.message] == ["stepcache"]
    first.push(GRADIENTS)
    second.push(GRADIENTS)
    assert second.version == 2, "the same optimizer is not replaced"
    check(first, [stored] * 2)


@pytest.mark.slow
def test_an_optimizer_is_replaced_and_the_state_kept(server, name):
    stored, other = optax.adam(0.1), optax.adam(0.01)
    with server.connect() as connection:
        first = opened(connection, name, stored)
        first.push(GRADIENTS)
        second = opened(connection, name, other, replace_optimizer=True)
        assert second.version == 2
        second.push(GRADIENTS)
        first.push(GRADIENTS)
        check(first, [stored, other, other])
        server.kill()
        server.start()
        check(first, [stored, other, other])
        first.push(GRADIENTS)
    server.stop()
    server.start()
    with server.connect() as connection:
        with pytest.warns(OptimizerWarning):
            opened(connection, name, stored)
        with warnings.catch_warnings(action="error"):
            again = opened(connection, name, other)
        again.push(GRADIENTS)
        check(again, [stored, *[other] * 4])


@pytest.mark.sample(every=2)
def test_state_of_other_types_is_made_anew(connection, name):
    params = opened(connection, name, optax.adam(0.1))
    for _ in range(2):
        params.push(GRADIENTS)
    value = params.value
    other = optax.sgd(0.1, momentum=0.5)
    opened(connection, name, other, replace_optimizer=True)
    params.push(GRADIENTS)
    expected = jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, value, GRADIENTS)
    for path, leaf in params.value.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-5)


@pytest.mark.sample(every=2)
def test_a_learning_rate_in_the_state_is_replaced(connection, name):
    made = optax.inject_hyperparams(optax.sgd)
    params = opened(connection, name, made(0.1, momentum=0.9))
    params.push(GRADIENTS)
    opened(connection, name, made(0.01, momentum=0.9), replace_optimizer=True)
    params.push(GRADIENTS)
    steps = [optax.sgd(rate, momentum=0.9) for rate in (0.1, 0.01)]
    check(params, steps)


def test_an_optimizer_of_an_earlier_version_is_replaced_without_a_warning(
    connection, name, monkeypatch
):
    stored, other = optax.sgd(0.1), optax.sgd(0.01)
    monkeypatch.setattr(
        "stepcache.serving.connection.export_rule",
        lambda *row: plain.pack(plain.unpack(export_rule(*row))[:3]),
    )
    params = opened(connection, name, stored)
    monkeypatch.undo()
    with warnings.catch_warnings(action="error"):
        opened(connection, name, other)
        params.push(GRADIENTS)
        opened(connection, name, other, replace_optimizer=True)
    params.push(GRADIENTS)
    check(params, [stored, other])


def test_only_an_optimizer_is_replaced(connection, name):
    with pytest.raises(OptionError, match="do nothing"):
        connection.variables(name, TREE, replace_optimizer=True)
    params = connection.variables(name, TREE)
    with pytest.raises(VariablesError, match="already exist"):
        opened(connection, name, optax.sgd(0.1), replace_optimizer=True)
    assert params.version == 0


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_optimizer_of_a_table_is_replaced(server):
    def opened(connection, optimizer, **options):
        return connection.table("users", 10, (2,), optimizer=optimizer, **options)

    one, other = sc.RowOptimizer("adagrad", 0.1), sc.RowOptimizer("adagrad", 0.5)
    with server.connect() as connection:
        table = opened(connection, one, replace_optimizer=True)
        rows = table.lookup(np.arange(4))
        table.push(rows, np.full_like(rows.values, 2.0))
        with pytest.raises(VariablesError, match=r"0\.1.*0\.5.*replace_optimizer=True replaces it"):
            opened(connection, other)
        opened(connection, other, replace_optimizer=True)
        table.push(rows, np.full_like(rows.values, 2.0))
        expected = -0.1 - 0.5 * 2 / np.sqrt(8)
        for _ in range(2):
            np.testing.assert_allclose(table.lookup([3]).values[0], expected, rtol=1e-5)
            server.kill()
            server.start()
        with pytest.raises(VariablesError, match="already exists"):
            opened(connection, sc.RowOptimizer("adam", 0.1), replace_optimizer=True)
        opened(connection, other)
