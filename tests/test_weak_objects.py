"""Weak references to objects, listed while other threads add and drop some."""

import gc
import threading
from pathlib import Path

import stepcache as sc
from stepcache.weak_objects import WeakObjects

LIMIT_SECONDS = 30


class Thing:
    pass


def test_weak_objects_can_be_listed_while_others_are_added():
    kept = [Thing() for _ in range(8)]
    objects = WeakObjects()
    for each in kept:
        objects.add(each)
        objects.add(each)
    for each in objects:
        kept.append(Thing())
        objects.add(kept[-1])
        assert each in objects
    del each
    assert len(list(objects)) == 16
    del kept[4:]
    gc.collect()
    assert list(objects) == kept and Thing() not in objects


def test_weak_objects_of_many_threads():
    objects, errors, ended = WeakObjects(), [], threading.Event()
    kept = [Thing() for _ in range(50)]
    for each in kept:
        objects.add(each)

    def add():
        while not ended.is_set():
            for each in [Thing() for _ in range(50)]:
                objects.add(each)

    def look():
        try:
            for _ in range(3000):
                assert len([each for each in objects if each is not None]) >= 50
        except BaseException as error:
            errors.append(error)

    adding = [threading.Thread(target=add, daemon=True) for _ in range(2)]
    looking = [threading.Thread(target=look, daemon=True) for _ in range(2)]
    for thread in (*adding, *looking):
        thread.start()
    for thread in looking:
        thread.join(LIMIT_SECONDS)
    ended.set()
    for thread in adding:
        thread.join(LIMIT_SECONDS)
    assert not errors and not any(thread.is_alive() for thread in (*adding, *looking))


def test_no_weak_set_is_shared_by_threads():
    """`WeakObjects` is used everywhere: a `WeakSet` cannot be listed while others add to it."""
    texts = {path: path.read_text() for path in Path(sc.__file__).parent.rglob("*.py")}
    assert not [path for path in texts if "WeakSet(" in texts[path] or "WeakSet[" in texts[path]]
