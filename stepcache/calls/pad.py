"""`Pad`: which argument of a step is padded, along which axis, to which sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stepcache.errors import OptionError, PaddingError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Pad:
    """Pads an argument of a step along one axis, to one of a few sizes.

        @sc.step(carry="state", batch="batch", pad=sc.Pad("batch", mask="mask"))
        def train_step(state, batch, mask):
            losses = loss_of_each(state, batch)
            return update(state, ...), jnp.sum(losses * mask) / jnp.sum(mask)

        train_step(state, batch)  # of any size: there is one program for each power of two

    The rows that are added are copies of the last one, so that what is computed of them is as
    finite as the rest. What the step returns of them is cut off: an output, but no carry, whose
    size follows the argument's. Outputs that sum or average over rows are the function's to mask.

    Attributes:
        argument: name of the argument, or names of several of one size. "batch/tokens" is the part
            of an argument that a path leads to.
        axis: which axis of each array; arrays with fewer axes stay as they are.
        sizes: "powers" are the powers of two; in a session that splits the batch over d devices,
            these times d. Or all sizes that there may be, ascending.
        mask: name of an argument of the function that is made by the step, not passed in calls: a
            bool array of the padded size, True where a row is the caller's.
        count: likewise, the number of the caller's rows: an int32.
        check: at each new size, before the call, run the function twice on the host's arrays with
            other rows added, without donation, and raise where outputs differ. For debugging.

    Raises:
        OptionError: `sizes` are no sizes, or `axis` is negative.
    """

    argument: str | tuple[str, ...]
    axis: int = 0
    sizes: Literal["powers"] | tuple[int, ...] = "powers"
    mask: str | None = None
    count: str | None = None
    check: bool = False

    def __post_init__(self):
        if isinstance(self.axis, bool) or not isinstance(self.axis, int) or self.axis < 0:
            raise OptionError("axis counts from 0", where="Pad", got=repr(self.axis))
        if self.sizes != "powers":
            object.__setattr__(self, "sizes", tuple(self.sizes))
            sizes: Any = self.sizes
            is_legal = bool(sizes) and all(type(each) is int and each > 0 for each in sizes)
            if not is_legal or list(sizes) != sorted(set(sizes)):
                expected = '"powers", or positive ints, ascending'
                raise OptionError("sizes", where="Pad", expected=expected, got=repr(sizes))

    def pads(self, argument: str, axis: object) -> bool:
        """Whether the sizes of an axis come from here."""
        names = {each.partition("/")[0] for each in self.arguments}
        return (axis == self.axis and argument in names) or argument == self.mask

    @property
    def arguments(self) -> tuple[str, ...]:
        """What `argument` names."""
        return (self.argument,) if isinstance(self.argument, str) else tuple(self.argument)

    def padded_size(self, size: int, parts: int = 1) -> int:
        """The size that an axis is padded to.

        Args:
            size: of the axis.
            parts: what it is split into.

        Raises:
            PaddingError: there is no size as large.
        """
        if self.sizes == "powers":
            return parts << max(-(-size // parts) - 1, 0).bit_length()
        for each in self.sizes:
            if each >= size:
                return each
        raise PaddingError(
            f"axis {self.axis} is larger than all sizes that it may be padded to",
            where=", ".join(self.arguments),
            expected=f"at most {self.sizes[-1]}",
            got=str(size),
        )

    def other_size(self, size: int) -> int:
        """Another size that the axis may have."""
        if self.sizes == "powers":
            return 2 * size
        return next((each for each in self.sizes if each != size), 2 * size)


def check_pads(fun: Callable, pads: Sequence[Any], roles: Mapping[str, Sequence[str]]) -> None:
    """Checks that what a step pads can be padded.

    Raises:
        OptionError: it cannot.
    """
    parameters = inspect.signature(fun).parameters
    for pad in pads:
        if not isinstance(pad, Pad):
            raise OptionError("pad takes sc.Pad, or several", where="step", got=repr(pad))
        taken = [argument.partition("/")[0] for argument in pad.arguments]
        for name in (*taken, *filter(None, (pad.mask, pad.count))):
            kind = parameters[name].kind if name in parameters else None
            if kind not in _NAMED:
                raise OptionError(
                    f"{name!r} is no argument of {getattr(fun, '__name__', fun)} that has a name",
                    where="Pad",
                    expected=f"one of {', '.join(parameters)}",
                )
        for name in taken:
            if name in roles["carry"]:
                raise OptionError(f"{name!r} is carried, and cannot be padded", where="Pad")
