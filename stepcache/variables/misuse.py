"""Errors for `Variables` used as an array, or as their tree. Imports little: each step needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepcache.errors import VariablesError

if TYPE_CHECKING:
    from stepcache.variables.policy import Placement, Read, Write

_NO_TREE = "variables are not an array, nor a tree of arrays"
_USE_VALUE = (
    "pass them as an argument of a step, whose function sees their tree; elsewhere use .value"
)


class NoTreeError(VariablesError, TypeError):
    """Variables are used as an array, or as their tree."""


class NoAttributeError(VariablesError, AttributeError):
    """Variables are asked for an attribute that they do not have; their tree may."""


class NoTree:
    """An object that is no tree: what only its tree can do raises `VariablesError`."""

    name: str
    placement: Placement
    read: Read
    write: Write
    _made = False  # Whether this process has made any yet.

    @property
    def __jax_array__(self):
        # JAX asks whatever is used as an array, and replaces the message of a `TypeError`.
        raise VariablesError(_NO_TREE, where=self.name, hint=_USE_VALUE)

    if not TYPE_CHECKING:  # Type checkers say already that there is nothing of this kind.

        def _refuse(self, *_, **__):
            raise NoTreeError(_NO_TREE, where=self.name, hint=_USE_VALUE)

        __getitem__ = __setitem__ = __len__ = __array__ = _refuse  # Iteration asks for items.
        __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = _refuse
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __rpow__ = _refuse
        __floordiv__ = __mod__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

        def __getattr__(self, name):
            what = f"variables have no attribute {name!r}"
            hint = _USE_VALUE
            if name in ("save", "restore"):
                hint = f"write stepcache.{name}(directory, value=...), with the variables"
            raise NoAttributeError(what, where=vars(self).get("name"), hint=hint)

        def __setattr__(self, name, value):
            if not name.startswith("_"):
                what = f"{name!r} of variables cannot be set"
                hint = "use .assign(tree); policies are given where variables are made"
                raise NoAttributeError(what, where=self.name, hint=hint)
            super().__setattr__(name, value)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self):
        what = "variables are neither pickled nor copied: all their users share one object"
        hint = "use .copy() for a copy; or pickle .value, and make new Variables from it"
        raise VariablesError(what, where=self.name, hint=hint)
