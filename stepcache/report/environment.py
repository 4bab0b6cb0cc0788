"""Whether programs built elsewhere can serve here: the parts of two environments, side by side.

A machine and what is installed on it decide that. What a process decides for itself (settings of
JAX, flags of XLA, how many CPU devices) cannot be known before the step runs: it is told, and does
not count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from stepcache.fingerprint.provenance import distribution_of
from stepcache.jaxcompat import inspection

_OF_THE_MACHINE = ("python", "system", "backend", "device kind", "topology", "CPU")
_DEVICES, _TOPOLOGY = "environment devices", "environment topology"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the environment that is another one here.

    Attributes:
        part: its name, as among the facts of a build.
        bundle: what the programs were built for; "absent" if nothing.
        here: what there is here, likewise.
    """

    part: str
    bundle: str
    here: str


def here() -> dict[str, str]:
    """The facts of this process. Starts JAX's default backend."""
    return inspection.process_environment()


def foreign_parts(facts: Mapping[str, str], own: Mapping[str, str]) -> list[Part]:
    """What keeps programs with these facts from ever serving on this machine.

    Args:
        facts: of a build.
        own: from `here`.
    """
    parts = _differing({name: facts[name] for name in _machine(facts) if name in facts}, own)
    for name, version in facts.items():
        if name.startswith("package "):
            installed = own.get(name) or distribution_of(name.removeprefix("package "))[1]
            if installed != version:
                parts.append(Part(name, version, installed or "absent"))
    return parts + _too_few_devices(facts, own)


def _machine(facts: Mapping[str, str]) -> list[str]:
    """The facts that a process cannot decide for itself."""
    names = [f"environment {name}" for name in _OF_THE_MACHINE]
    return [name for name in names if name != _TOPOLOGY or not _is_for_cpu(facts)]


def _is_for_cpu(facts: Mapping[str, str]) -> bool:
    """CPU devices are made at will, and the topology tells no more than how many there are."""
    return facts.get("environment backend", "").startswith("cpu")


def _too_few_devices(facts: Mapping[str, str], own: Mapping[str, str]) -> list[Part]:
    """Devices are found by position among those of the call, so any serve if there are enough."""
    counts = re.fullmatch(r"\d+, (\d+) local", facts.get(_DEVICES, ""))
    if counts is None or _is_for_cpu(facts) or int(counts[1]) <= jax.local_device_count():
        return []
    return [Part(_DEVICES, facts[_DEVICES], own[_DEVICES])]


def settings_that_differ(facts: Mapping[str, str], own: Mapping[str, str]) -> list[Part]:
    """What the process that runs the step has to set otherwise than this one does."""
    machine = {*_machine(facts), _TOPOLOGY}

    def settings(all_facts: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in all_facts.items()
            if name not in machine
            and (
                (name.startswith("environment ") and not name.startswith("environment variable "))
                # Another JAX has other settings; their absence says nothing.
                or (name.startswith("config ") and name in facts and name in own)
            )
        }

    told, ours = settings(facts), settings(own)
    added = [Part(name, "absent", value) for name, value in ours.items() if name not in told]
    return _differing(told, ours) + added


def _differing(facts: Mapping[str, str], own: Mapping[str, str]) -> list[Part]:
    return [
        Part(name, value, own.get(name, "absent"))
        for name, value in facts.items()
        if own.get(name) != value
    ]
