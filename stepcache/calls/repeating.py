"""`repeated`: a step that runs another one several times in one call, by `lax.scan`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.tree_util import keystr

from stepcache.calls.carry import OverStep, argument_of
from stepcache.calls.signature import Parameters
from stepcache.calls.step_spec import StepSpec
from stepcache.errors import OptionError


def repeated(spec: StepSpec, count: int) -> StepSpec:
    """The spec of a step that runs another one `count` times.

    Raises `OptionError` if that carries nothing, pads arguments, or says where they go.
    """
    refused = partial(OptionError, where=f"{spec.name}.repeat")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        what, expected = "a step is repeated a whole number of times", "an int of at least 1"
        raise refused(what, expected=expected, got=repr(count))
    if not spec.parameters.carry:
        what = "a step without a carry would do the same thing each time"
        raise refused(what, hint='name what it updates: @sc.step(carry="state")')
    for name in ("in_shardings", "out_shardings"):
        if name in spec.options:
            hint = "let a Session place its arguments, by roles and rules"
            raise refused(f"a step with {name} cannot be repeated", hint=hint)
    if spec.pads:
        raise refused("a step that pads cannot be repeated")
    fun = _Repeated(spec.fun, f"{spec.name}.repeat({count})", spec.parameters, count)
    made = StepSpec.of(fun, spec.options, spec.parameters.carry, spec.parameters.batch)
    return made._replace(parameters=made.parameters._replace(stacked=True))


class _Repeated(OverStep):
    def __init__(self, fun: Callable, name: str, parameters: Parameters, count: int):
        super().__init__(fun, name, parameters)
        self._batch, self._count = parameters.batch, count

    def __repr__(self) -> str:
        return f"{self.__wrapped__!r}, {self._count} times"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        carried = tuple(argument_of(self._positional, args, kwargs, name) for name in self._carry)
        batches = {name: argument_of(self._positional, args, kwargs, name) for name in self._batch}
        self._check_sizes(batches)
        form: list[Any] = []

        def run(carried: tuple, batches: dict[str, Any]) -> tuple[tuple, tuple]:
            values = dict(zip(self._carry, carried, strict=True)) | batches
            given = [values.get(name, each) for name, each in zip(self._positional, args)]  # noqa: B905
            given += args[len(given) :]
            named = {name: values.get(name, each) for name, each in kwargs.items()}
            outputs = self.__wrapped__(*given, **named)
            new, rest, rebuild = self._parts(outputs, carried)
            form[:] = [rebuild]
            return new, rest

        new, rest = jax.lax.scan(run, carried, batches, length=self._count)
        return form[0](new, rest)

    def _check_sizes(self, batches: dict[str, Any]) -> None:
        """Raises `OptionError` where a batch has not as many parts as there are runs."""
        for name, batch in batches.items():
            for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
                if leaf.shape[:1] != (self._count,):
                    raise OptionError(
                        "a repeated step needs the batches of all runs",
                        where=f"{self.__name__}, {name}{keystr(keys)}",
                        expected=f"a first dimension of {self._count}",
                        got=f"{leaf.dtype}{list(leaf.shape)}",
                        hint="stack them: jax.tree.map(lambda *each: jnp.stack(each), *batches)",
                    )
