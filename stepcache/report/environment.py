"""Compares the environment that a program was built for with the one here.

The machine and the installed packages decide whether a program can serve here at all. Settings that
each process chooses (JAX's configuration, XLA's flags, the number of CPU devices) are reported, but
do not make a program foreign.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

from stepcache.fingerprint.dependencies import kind_of
from stepcache.fingerprint.provenance import distribution_of
from stepcache.jaxcompat import inspection

_OF_THE_MACHINE = ("python", "system", "backend", "device kind", "topology", "CPU")
_DEVICES, _TOPOLOGY = "environment devices", "environment topology"


@dataclass(frozen=True, slots=True)
class Part:
    """A difference between two environments.

    Attributes:
        part: name of the dependency.
        bundle: value that the programs were built for, or "absent".
        here: value in this process, or "absent".
    """

    part: str
    bundle: str
    here: str


def here() -> dict[str, str]:
    """The environment of this process. Starts JAX's default backend."""
    return inspection.process_environment()


def foreign_parts(dependencies: Mapping[str, str], own: Mapping[str, str]) -> list[Part]:
    """Differences because of which a program can never serve on this machine.

    Args:
        dependencies: dependencies of the build.
        own: from `here`.
    """
    parts = _differing(
        (name for name in _machine(dependencies) if name in dependencies), dependencies, own
    )
    for name, version in dependencies.items():
        if kind_of(name) == "package":
            installed = own.get(name) or distribution_of(name.removeprefix("package "))[1]
            if installed != version:
                parts.append(Part(name, version, installed or "absent"))
    # An executable names its devices by position, so any devices serve if there are enough.
    count = re.fullmatch(r"\d+, (\d+) local", dependencies.get(_DEVICES, ""))
    if count and not _is_for_cpu(dependencies) and int(count[1]) > jax.local_device_count():
        parts += _differing([_DEVICES], dependencies, own)
    return parts


def settings_that_differ(dependencies: Mapping[str, str], own: Mapping[str, str]) -> list[Part]:
    """Settings that the process which runs the step must change, compared with this process."""
    machine = {*_machine(dependencies), _TOPOLOGY}

    def is_setting(name: str) -> bool:
        if kind_of(name) == "config":  # Another version of JAX has other settings.
            return name in dependencies and name in own
        return kind_of(name) == "environment" and name not in machine

    return _differing(filter(is_setting, dict.fromkeys((*dependencies, *own))), dependencies, own)


def _machine(dependencies: Mapping[str, str]) -> list[str]:
    """The parts of the environment that a process cannot choose."""
    names = [f"environment {name}" for name in _OF_THE_MACHINE]
    # The topology of a CPU is only the number of its devices, which each process chooses.
    return [name for name in names if name != _TOPOLOGY or not _is_for_cpu(dependencies)]


def _is_for_cpu(dependencies: Mapping[str, str]) -> bool:
    return dependencies.get("environment backend", "").startswith("cpu")


def _differing(
    names: Iterable[str], dependencies: Mapping[str, str], own: Mapping[str, str]
) -> list[Part]:
    return [
        Part(name, dependencies.get(name, "absent"), own.get(name, "absent"))
        for name in names
        if dependencies.get(name) != own.get(name)
    ]
