"""What a function wraps, and what is said of steps that the same code makes again and again."""

import functools
import gc
import threading
import types

import jax
import pytest
from flax import linen

import stepcache as sc
from stepcache.calls import layers
from stepcache.calls.layers import Making, count_step, definition_of, function_name

HERE = "test_layers.py"


def hints(step):
    step(1.0)
    return step.last_miss.advice


def line_of(fun):
    return fun.__code__.co_firstlineno


def loss(x):
    return x * x


class Model:
    def __call__(self, x):
        return x

    def apply(self, x):
        return x


def test_a_step_made_in_each_pass_of_a_loop_is_named():
    found = []
    for _ in range(3):
        step = sc.step(made := lambda x: x + 1)
        foreseen = step.explain(1.0).miss.advice
        found.append(hints(step))
        assert foreseen == found[-1]
    assert found[0] == ()
    for number, (hint,) in enumerate(found[1:], 2):
        assert f"this is step {number} made from the function at " in hint
        assert f"{HERE}:{line_of(made)} in this process" in hint
        assert "and compiled unless its module is the same" in hint and "before the loop" in hint
    assert f"hint: {found[2][0]}" in str(step.last_miss)


def test_a_nested_function_defined_in_each_call_is_named():
    def train(rate):
        def step(x):
            return x * rate

        return sc.step(step)

    assert hints(train(1.0)) == ()
    assert "step 2 made" in hints(train(2.0))[0]


def test_only_the_first_call_of_such_a_step_says_so():
    first, second = (sc.step(lambda x: x) for _ in range(2))
    assert hints(first) == () and hints(second) != ()
    assert second(1) is not None and second.last_miss.reason == "changed"
    assert not any("made from" in each for each in second.last_miss.advice)


def test_a_step_over_the_same_function_finds_its_program_and_says_nothing():
    kept = sc.step(loss)
    kept(1.0)
    again = sc.step(loss)
    again(1.0)
    assert again.last_miss is None


@pytest.mark.parametrize(
    "make",
    [
        lambda fun: jax.grad(fun),
        lambda fun: jax.vmap(jax.grad(fun)),
        lambda fun: functools.partial(fun, 1.0),
        lambda fun: sc.step(fun),
        lambda fun: functools.lru_cache(fun),
        lambda fun: types.MethodType(fun, 1.0),
        lambda fun: fun,
    ],
    ids=["grad", "vmap", "partial", "step", "lru_cache", "method", "bare"],
)
def test_steps_are_counted_by_their_own_code_and_by_what_wraps_it(make):
    def mine(x):
        return x

    def other(x):
        return x

    first, of_other = count_step(make(mine)).count, count_step(make(other)).count
    assert [count_step(make(mine)).count for _ in range(2)] == [first + 1, first + 2]
    assert count_step(make(other)).count == of_other + 1
    assert count_step(make(mine)).place == f"{HERE}:{line_of(mine)}"


def test_instances_and_their_methods_are_counted_by_the_code_of_their_class():
    before = count_step(Model()).count
    assert count_step(Model()).count == before + 1
    assert count_step(Model().apply).place == f"{HERE}:{line_of(Model.apply)}"
    assert count_step(max).place == ""


def test_steps_over_one_function_of_a_library_are_not_steps_made_again():
    for width in (1, 2):
        assert count_step(linen.Dense(width).apply) == Making()


def test_code_that_is_compiled_again_begins_at_one():
    """As a cell of a notebook, or a module that is loaded again."""
    source = "def f(x): return x\ncounts = [count_step(f).count, count_step(f).count]"
    for _ in range(2):
        space = {"count_step": count_step}
        exec(source, space)
        assert space["counts"] == [1, 2]


def test_counts_go_with_the_code():
    space = {}
    exec("def f(x): return x", space)
    gc.collect()
    before = len(layers._steps)
    count_step(space["f"])
    assert len(layers._steps) == before + 1
    del space
    gc.collect()
    assert len(layers._steps) <= before


def test_the_wrappings_of_one_code_are_bounded():
    def mine(x):
        return x

    for number in range(1000):
        space = {"mine": mine, "wraps": functools.wraps}
        code = compile(f"@wraps(mine)\ndef w{number}(x): return mine(x)", f"f{number}.py", "exec")
        exec(code, space)
        count_step(space[f"w{number}"])
    assert len(layers._steps[id(mine.__code__)][1]) <= 256


def test_threads_count_every_step():
    def mine(x):
        return x

    def count():
        for _ in range(200):
            count_step(mine)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count_step(mine).count == 8 * 200 + 1


class Answering:
    """Has attributes that functions in wrappings have, and wraps nothing."""

    def __init__(self):
        self.func = self.__func__ = max

    def __call__(self, x):
        return x


def test_attributes_that_only_look_like_a_wrapping_are_not_followed():
    value = Answering()
    assert definition_of(value) is Answering.__call__
    assert function_name(value) == "Answering"
    value.func = value
    assert function_name(value) == "Answering"
    assert sc.step(value)(1.0) == 1.0


def test_the_definition_of_a_transformed_function_is_the_users():
    assert definition_of(jax.grad(loss)) is loss
    assert definition_of(jax.vmap(sc.step(jax.grad(sc.step(loss))))) is loss
    decorated = functools.wraps(loss)(lambda x: loss(x))
    assert definition_of(jax.checkpoint(decorated)) is decorated
