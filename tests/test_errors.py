"""Errors travel between processes whole, and warnings point to the user's line."""

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import stepcache as sc
from stepcache.errors import first_line, warn

DETAILS = {"where": "here", "expected": "this", "got": "that", "hint": "another"}
ERRORS = [
    sc.OptionError("an option", **DETAILS),
    sc.RecompileError("a call", sc.Miss("f", 1, "first call"), **DETAILS),
    sc.TransferBudgetError("a call", 3, 2, **DETAILS),
    sc.AgreementError("ranks", (), ((0,), (1,)), **DETAILS),
    sc.RankLostError("a rank", (1,), **DETAILS),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("take", [lambda each: pickle.loads(pickle.dumps(each)), copy.copy])
def test_an_error_is_pickled_with_all_that_it_says(error, take):
    """As a pool of processes hands it back: what it could not unpickle would hang it."""
    error.add_note("a note")
    taken = take(error)
    assert type(taken) is type(error)
    assert (str(taken), vars(taken)) == (str(error), vars(error))


@pytest.mark.parametrize("place", ["/home/me/jax/train.py", f"{sc.__path__[0]}_training.py"])
def test_a_warning_points_to_the_users_line_wherever_that_is(place):
    code = compile("warn('a reason', category)", place, "exec")
    with pytest.warns(sc.StepCacheWarning, match="a reason") as caught:
        exec(code, {"warn": warn, "category": sc.StepCacheWarning})
    assert caught[0].filename == place


def test_a_warning_of_a_thread_is_logged_where_the_user_turns_warnings_into_errors(caplog):
    """Raised there, it would end the work of the thread, and nobody could catch it."""
    names = {"warn": warn, "category": sc.StepCacheWarning}
    places = {"ours": f"{sc.__path__[0]}/on_a_thread.py", "the user's": __file__}
    code = {
        whose: compile("warn('a reason', category)", *(place, "exec"))
        for whose, place in places.items()
    }
    with warnings.catch_warnings(), ThreadPoolExecutor(1) as pool:
        warnings.simplefilter("error")
        with pytest.raises(sc.StepCacheWarning, match="a reason"):
            exec(code["the user's"], names)
        assert not caplog.messages
        pool.submit(exec, code["ours"], names).result()
    assert caplog.messages == ["a reason"]


def test_an_error_as_one_line_ends_without_a_colon():
    """It is a part of other sentences."""
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert first_line(ValueError("these differ:\n  a")) == "ValueError: these differ"
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"


@pytest.mark.parametrize("options", [{}, {"carry": "x"}])
def test_a_callable_without_weak_references_is_refused_each_time(options):
    """When it is called, as by `jax.jit`; a second `jax.jit` of it would end the process."""

    class Callable:
        __slots__ = ()

        def __call__(self, x):
            return x

    function = Callable()
    for _ in range(2):
        step = sc.step(function, **options)
        with pytest.raises(TypeError, match="cannot create weak reference") as error:
            step(1.0)
        assert "'__weakref__' has to be one of them" in error.value.__notes__[0]
