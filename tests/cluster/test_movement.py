"""Where a thread is, seen from another one while it runs on."""

import sys
import threading
from types import SimpleNamespace

from stepcache.distributed.hang_report import Movement


def code(x):
    return x


class Frame(SimpleNamespace):
    """One of the standard library, which has returned when its caller is asked for again."""

    f_code = threading.Thread.run.__code__
    f_lasti, f_lineno = 0, 1
    callers: list

    @property
    def f_back(self):
        return self.callers.pop(0) if self.callers else None


def test_a_frame_may_return_while_it_is_looked_at(monkeypatch):
    caller = SimpleNamespace(f_code=code.__code__, f_lasti=0, f_lineno=1, f_back=None)
    thread = threading.get_ident()
    for callers, where in (([caller], "code"), ([], "run")):
        frame = Frame(callers=list(callers))
        monkeypatch.setattr(sys, "_current_frames", lambda frame=frame: {thread: frame})
        movement = Movement(thread)
        movement.look()
        assert movement.where.endswith(f"in {where}")
