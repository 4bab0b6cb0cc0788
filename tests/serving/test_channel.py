"""A reader that waits on a channel: when it polls, and when it sleeps."""

import os
import time

import pytest

from stepcache.serving import channel


class Clock:
    """A clock that only `sched_yield` moves."""

    def __init__(self, monkeypatch):
        self.now, self.slice_seconds, self.yields = 10.0, 20e-6, 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(os, "sched_yield", self.give_way)

    def give_way(self):
        self.yields += 1
        self.now += self.slice_seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def polls_of(spin, arrives_at=float("inf")):
    """Returns how often a spin polls, and what it finds."""
    polls = []

    def poll():
        polls.append(time.perf_counter())
        return ["message"] * (polls[-1] >= arrives_at)

    return spin(poll), len(polls)


def test_it_polls_for_a_short_time(clock):
    spin = channel._Spin()
    assert polls_of(spin, arrives_at=10.0) == (["message"], 1)
    assert clock.yields == 0
    assert polls_of(spin, arrives_at=clock.now + 50e-6)[0] == ["message"]
    started = clock.now
    found, polls = polls_of(spin)
    assert (found, polls) == ([], clock.yields - 3 + 1)
    assert clock.now - started == pytest.approx(channel._SPIN_SECONDS, abs=clock.slice_seconds)


def test_it_sleeps_at_once_while_another_program_needs_the_cpu(clock):
    spin = channel._Spin()
    clock.slice_seconds = 4e-3
    assert polls_of(spin) == ([], 2), "it looks once more after the other's time slice"
    assert clock.yields == 1
    for _ in range(3):
        assert polls_of(spin) == ([], 0)
    clock.now += channel._BUSY_SECONDS
    clock.slice_seconds = 20e-6
    assert polls_of(spin)[1] > 5


def test_what_arrived_during_the_time_slice_is_found(clock):
    spin = channel._Spin()
    clock.slice_seconds = 4e-3
    assert polls_of(spin, arrives_at=clock.now + 1e-3) == (["message"], 2)
