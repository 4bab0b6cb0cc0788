"""`ModuleStepBase`: what steps over nnx and equinox modules tell, as `stepcache.step.Step` does."""

from __future__ import annotations

from typing import Any

from stepcache.calls.layers import function_name
from stepcache.events import Miss, StepStats
from stepcache.report.explanation import Explanation
from stepcache.step import Step


class ModuleStepBase:
    """A step over modules that another step, over their arrays, serves."""

    __wrapped__: Any
    _step: Step
    _made_by: str

    def __repr__(self) -> str:
        return f"<{self._made_by} of {function_name(self.__wrapped__)}>"

    def _shown(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the step over arrays, without running anything."""
        raise NotImplementedError

    def warm(self, *args: Any, **kwargs: Any) -> None:
        """Builds the program for these arguments, if it is not there; runs and changes nothing.

        Args:
            *args: as in a call; arrays may be `jax.ShapeDtypeStruct`, also those of modules.
            **kwargs: as in a call.

        Raises:
            PlacementError: the session cannot place an argument as asked.
            OptionError: options of a step over nnx modules place arguments, so that nnx serves it.
        """
        args, kwargs = self._shown(args, kwargs)
        self._step.warm(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Says whether a call would hit and why, and where each argument would go. Runs nothing.

        Args:
            *args: as in a call; arrays may be `jax.ShapeDtypeStruct`, also those of modules.
            **kwargs: as in a call.

        Returns:
            An `Explanation`, in which arrays have their paths, such as `model.layers[3].kernel`.

        Raises:
            OptionError: options of a step over nnx modules place arguments, so that nnx serves it.
        """
        args, kwargs = self._shown(args, kwargs)
        return self._step.explain(*args, **kwargs)

    def stats(self) -> StepStats:
        """What the step has cost so far. Hits are counted as `StepStats.hits` says."""
        return self._step.stats()

    @property
    def last_miss(self) -> Miss | None:
        """Why the latest program was built; None before the first."""
        return self._step.last_miss
