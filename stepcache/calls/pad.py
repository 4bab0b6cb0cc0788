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

    The added rows are copies of the last row, so that they cause no infinities or NaNs of their
    own. They are cut from outputs whose size depends on the padded axis, but not from a carry. The
    function must mask sums and means over rows.

    A session places the mask as the axis that it masks. In a pod, each process pads its part of a
    batch, and the mask covers all parts. All processes must come to the same size: if their parts
    differ in size, give one size that fits all.

    Attributes:
        argument: name of the argument, or names of several with equal sizes. "batch/tokens" pads
            only the part of `batch` at this path.
        axis: axis of each array. Arrays with fewer axes are not padded.
        sizes: the sizes to pad to, ascending; or "powers" for powers of two (times d in a session
            that splits the batch over d devices).
        mask: name of an argument of the function that the step fills in, so calls must not pass
            it: a bool array of the padded size, True for the caller's rows.
        count: the same for an int32, the number of the caller's rows. Not for parts of a pod.
        check: for debugging. At each new size, the function runs twice, without donation and with
            different added rows; outputs that differ raise `PaddingError`.

    Raises:
        OptionError: `sizes` are not ascending positive ints, or `axis` is negative.
    """

    argument: str | tuple[str, ...]
    axis: int = 0
    sizes: Literal["powers"] | tuple[int, ...] = "powers"
    mask: str | None = None
    count: str | None = None
    check: bool = False

    def __post_init__(self):
        if not isinstance(self.argument, str):
            object.__setattr__(self, "argument", tuple(self.argument))
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
        """Returns whether this padding determines an axis of an argument."""
        names = {each.partition("/")[0] for each in self.arguments}
        return (axis == self.axis and argument in names) or argument == self.mask

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names in `argument`."""
        return (self.argument,) if isinstance(self.argument, str) else self.argument

    def covers(self, path: str) -> bool:
        """Returns whether this pads the array at a path, such as "batch/tokens/0"."""
        return any(f"{path}/".startswith(f"{argument}/") for argument in self.arguments)

    def padded_size(self, size: int, parts: int = 1) -> int:
        """Returns the size that an axis, split into so many parts, is padded to.

        Raises:
            PaddingError: all of `sizes` are smaller.
        """
        if self.sizes == "powers":
            return parts << max(-(-size // parts) - 1, 0).bit_length()
        for each in self.sizes:
            if each >= size:
                return each
        what = f"axis {self.axis} is larger than all sizes of its padding"
        raise self._error(what, expected=f"at most {self.sizes[-1]}", got=str(size))

    def _error(self, what: str, **details: Any) -> PaddingError:
        return PaddingError(what, where=", ".join(self.arguments), **details)

    def other_size(self, size: int) -> int:
        """Returns another possible size of the axis."""
        if self.sizes == "powers":
            return 2 * size
        return next((each for each in self.sizes if each != size), 2 * size)


def check_pads(fun: Callable, pads: Sequence[Any], roles: Mapping[str, Sequence[str]]) -> None:
    """Checks the `pad` option of a step. Raises `OptionError` if an argument cannot be padded."""
    parameters = inspect.signature(fun).parameters
    for pad in pads:
        if not isinstance(pad, Pad):
            raise OptionError("pad takes sc.Pad, or several", where="step", got=repr(pad))
        taken = [argument.partition("/")[0] for argument in pad.arguments]
        for name in filter(None, (*taken, pad.mask, pad.count)):
            kind = parameters[name].kind if name in parameters else None
            if kind not in _NAMED:
                what = f"{getattr(fun, '__name__', fun)} has no argument of the name {name!r}"
                expected = f"one of {', '.join(parameters)}"
                raise OptionError(what, where="Pad", expected=expected)
            if name in roles["carry"]:
                raise OptionError(f"{name!r} is carried, and cannot be padded", where="Pad")
