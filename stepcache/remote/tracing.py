"""Traces steps over the abstract mesh of tasks, and exports them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh, NamedSharding

from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import TaskError, first_line


class TracedStep:
    """A function, traced over the mesh of the tasks.

    Attributes:
        stand_ins: of its arguments.
        out_tree, out_avals: of its outputs.
        pins: where outputs have to go; None where XLA decides.
        donated: numbers of the arguments that it takes.
        carried: numbers of those that the first outputs update, in their order.
    """

    def __init__(
        self,
        fun: Callable,
        stand_ins: list[jax.ShapeDtypeStruct],
        mesh: AbstractMesh,
        seconds: dict[str, float],
    ):
        self.stand_ins, self._mesh = stand_ins, mesh
        self.out_tree: Any = None
        self.pins: Sequence[NamedSharding | None] = ()
        self.donated: set[int] = set()
        self.carried: list[int] = []
        started = time.perf_counter()

        def flat(*leaves):
            outputs, self.out_tree = jax.tree_util.tree_flatten(fun(*leaves))
            return outputs

        shardings = tuple(each.sharding for each in stand_ins)
        self._jitted = jax.jit(flat, in_shardings=shardings)
        with jax.sharding.use_abstract_mesh(mesh):
            traced = self._jitted.trace(*stand_ins)
        self.out_avals = traced.jaxpr.out_avals
        seconds["trace"] = seconds.get("trace", 0.0) + time.perf_counter() - started

    @property
    def out_pins(self) -> list[NamedSharding | None]:
        """Where each output has to go; None where XLA decides."""
        return [*self.pins, *[None] * (len(self.out_avals) - len(self.pins))]

    def exported(self, platform: str, name: str) -> bytes:
        """Returns the program as bytes. Raises `TaskError` if it has effects, such as callbacks."""
        try:
            with jax.sharding.use_abstract_mesh(self._mesh):
                made = export.export(self._jitted, platforms=(platform,))(*self.stand_ins)
            return bytes(made.serialize())
        except Exception as error:
            raise TaskError(
                "the step cannot run in another process",
                where=name,
                got=f"{type(error).__name__}: {first_line(error)}",
                hint="callbacks and other effects need the process that traced them",
            ) from error


def donated_leaves(spec: StepSpec, request: Request) -> set[int]:
    """Returns the numbers of the leaves that a call donates."""
    call, roles = request.call, spec.parameters.roles
    passed = (*zip(call.positions, call.names, strict=True), *((None, n) for n in call.kwargs))
    donated = {
        name for at, name in passed if at in roles.donate_argnums or name in roles.donate_argnames
    }
    leaves = (name for name, tree in call.arguments.items() for _ in jax.tree.leaves(tree))
    return {number for number, name in enumerate(leaves) if name in donated}
