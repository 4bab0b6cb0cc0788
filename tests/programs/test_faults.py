"""A fault at each line of what is done for the programs on disk: no call knows of it.

A trace function raises at one line after the other: in the jobs that store, and in what a call
itself does to look for a program and to load it. The last resort, a compilation, is there in all
cases.
"""

import contextlib
import faulthandler
import gc
import inspect
import itertools
import logging
import shutil
import sys
import threading
import types
from concurrent.futures import wait

import numpy as np
import pytest

import stepcache as sc
from stepcache import jaxcompat
from stepcache.programs import prediction, resolve, store
from stepcache.storage import building, disk_store, private_files

pytestmark = pytest.mark.skipif(not jaxcompat.CAN_STORE, reason="nothing is stored")

LIMIT_SECONDS = 60
SOURCE = """
import stepcache as sc
@sc.step
def step(x):
    return x * 2 + 1
"""
FAULTS = {
    "RuntimeError": lambda: RuntimeError("a fault was injected"),
    "MemoryError": lambda: MemoryError("a fault was injected"),
    "OSError": lambda: OSError(5, "a fault was injected"),
}


def codes_of(*owners):
    """The code of functions, and of all functions of classes and modules."""
    found = set()
    for owner in owners:
        if inspect.isclass(owner) or inspect.ismodule(owner):
            name = owner.__name__ if inspect.ismodule(owner) else owner.__module__
            for member in vars(owner).values():
                if getattr(member, "__module__", None) == name:
                    found |= codes_of(member)
            continue
        nested = [getattr(inspect.unwrap(owner), "__code__", None)]
        while nested:
            code = nested.pop()
            if code is not None and code.co_filename != "<string>":  # As of a dataclass.
                found.add(code)
                nested += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found


# Not the boundary of the store, nor what opens a directory.
WATCHED = codes_of(
    store.ProgramStore,
    resolve._Settling,
    prediction.Predictions,
    prediction.Preloader.take,
    building.BuildLock,
    private_files.create,
    *(getattr(disk_store.DiskStore, name) for name in ("read", "loading", "publish", "_write")),
    *(getattr(disk_store.DiskStore, name) for name in ("_examine", "_prepare", "_path")),
) - codes_of(
    *(getattr(store.ProgramStore, name) for name in ("__init__", "flush")),
    *(prediction.Predictions.__init__, prediction.Predictions.begin),
    store._no_matter_of_the_step,
)


class Injection:
    """Context manager in which the first pass of one line raises; without a line, it notes all."""

    def __init__(self, place=None, fault=None):
        self.place, self.fault, self.places, self.raised = place, fault, {}, None

    def _enter(self, frame, event, argument):
        return self._line if frame.f_code in WATCHED else None

    def _line(self, frame, event, argument):
        if event == "line":
            place = (frame.f_code, frame.f_lineno)
            self.places.setdefault(place)
            if place == self.place and self.raised is None:
                self.raised = self.fault()
                raise self.raised
        return self._line

    def __enter__(self):
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        threading.settrace(None)
        self.place = None  # Threads that are idle are traced until they end.


def process(directory, injection=None, *, ahead=True):
    """A process, as far as a step can tell, that uses a directory of programs.

    It loads one program, compiles another one, and stays until that is stored.

    Args:
        directory: with the first of the programs.
        injection: a context manager, open from the making of the session to the last of this.
        ahead: whether what is preloaded is there at the first call.
    """
    cache = sc.ProgramCache(directory)
    module = types.ModuleType("faults")
    module.__file__ = str(directory / "faults.py")
    gc.collect()  # Steps that are there are preloaded, too.
    with injection or contextlib.nullcontext():
        session = sc.Session(cache=cache)
        with session:
            exec(compile(SOURCE, module.__file__, "exec"), module.__dict__)
            if ahead and (preparing := cache.store().preloader.preparing) is not None:
                wait([preparing])
                wait([load for _, load in cache.store().preloader.loads.values()], 5)
            for size in (3, 4):
                assert float(module.step(np.ones(size, np.float32))[-1]) == 3
            cache.flush()
            cache.flush()
    with session:
        for size in (3, 4, 5):
            assert float(module.step(np.ones(size, np.float32))[-1]) == 3
    cache.flush()
    return module.step.stats()


def within_limit(work):
    """What `work` returns or raises; where it hangs, an error after a dump of all threads."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    if not outcome:
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail("it hangs")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


@pytest.fixture
def first(tmp_path, monkeypatch):
    """A directory that has the program of a call of three numbers."""
    monkeypatch.setattr(store, "_QUIET_SECONDS", 0.0)
    directory = tmp_path / "first"
    cache = sc.ProgramCache(directory)
    module = types.ModuleType("faults")
    module.__file__ = str(directory / "faults.py")
    with sc.Session(cache=cache):
        exec(compile(SOURCE, module.__file__, "exec"), module.__dict__)
        module.step(np.ones(3, np.float32))
    cache.flush()
    cache.flush()
    return directory


def places_of(directory, tmp_path):
    """The lines that are passed, by those who pass them."""
    shutil.copytree(directory, tmp_path / "counted")
    injection = Injection()
    stats = within_limit(lambda: process(tmp_path / "counted", injection))
    assert (stats.loads, stats.compiles) == (1, 2)
    return sorted(injection.places, key=lambda place: (place[0].co_filename, place[1]))


def logged(caplog):
    return "\n".join(map(logging.Formatter().format, caplog.records))


def what_goes_wrong(directory, place, fault, ahead, caplog):
    """What is wrong where one line raises: in that process, or in the next one; else None."""
    caplog.clear()
    injection = Injection(place, FAULTS[fault])
    try:
        within_limit(lambda: process(directory, injection, ahead=ahead))
        # That a file cannot be noted or taken away is, by design, not always worth a word.
        unseen = injection.raised is not None and fault != "OSError"
        if unseen and "a fault was injected" not in logged(caplog):
            return "it is not logged"
        caplog.clear()
        stats = within_limit(lambda: process(directory))
        if stats.loads + stats.compiles != 3:
            return f"the next process: {stats}"
        return f"the next process: {logged(caplog)}" if "Traceback" in logged(caplog) else None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "every", [211, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_fault_at_any_line_is_no_matter_of_the_call(every, first, tmp_path, caplog):
    places = places_of(first, tmp_path)
    assert len(places) > 150
    caplog.set_level(logging.INFO, "stepcache")
    cases = list(itertools.product(places, FAULTS))[::every]
    wrong = []
    for number, (place, fault) in enumerate(cases):
        directory = tmp_path / f"{number}"
        shutil.copytree(first, directory)
        found = what_goes_wrong(directory, place, fault, number % 2 == 0, caplog)
        if found is not None:
            wrong.append(f"{fault} in {place[0].co_qualname}, line {place[1]}: {found}")
        shutil.rmtree(directory, ignore_errors=True)
    assert not wrong, "\n".join(wrong)
