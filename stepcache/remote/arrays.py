"""`RemoteArray`: an array that lives on the tasks."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stepcache import jaxcompat
from stepcache.errors import TaskError

if TYPE_CHECKING:
    from stepcache.remote.connection import Connection


_numbers = itertools.count(1)


class ArrayType:
    """The type of an output of a program.

    Attributes:
        shape, dtype, weak_type, sharding: as of any array.
        size_bytes: of the whole.
        number: different for each.
    """

    __slots__ = ("dtype", "number", "shape", "sharding", "size_bytes", "weak_type")

    def __init__(self, shape: tuple[int, ...], dtype: Any, weak_type: bool, sharding: Any):
        self.shape, self.dtype, self.weak_type = tuple(shape), dtype, bool(weak_type)
        self.sharding, self.number = sharding, next(_numbers)
        self.size_bytes = math.prod(shape) * dtype.itemsize


class RemoteArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that lives on the tasks of a session, as a step has returned it.

    It can be passed to steps, which moves nothing. Looked at (`float(x)`, `np.asarray(x)`,
    arithmetic), it is fetched, once. The tasks drop it when nothing refers to it any more.

    Attributes:
        shape, dtype, weak_type: as of any array.
        sharding: over the abstract mesh of the session.

    Raises:
        TaskError: when it is looked at, if the step failed, or has donated it since.
        RankLostError: when it is looked at, if the tasks were lost.
    """

    __slots__ = (
        *("__weakref__", "_connection", "_incarnation", "_index", "_is_held"),
        *("_made_stand_in", "_run", "_type", "_value"),
    )

    def __init__(
        self, connection: Connection, incarnation: int, run: int, index: int, type: ArrayType
    ):
        self._connection, self._incarnation = connection, incarnation
        self._run, self._index, self._type = run, index, type
        self._made_stand_in: Any = None
        self._value: np.ndarray | None = None
        self._is_held = True  # Whether the tasks hold it for this object.

    @property
    def _stand_in(self) -> jax.ShapeDtypeStruct:
        """Stands for this array, and no other one, in a call."""
        if self._made_stand_in is None:
            each = self._type
            self._made_stand_in = jaxcompat.stand_in(
                each.shape, each.dtype, each.weak_type, each.sharding
            )
        return self._made_stand_in

    @property
    def shape(self) -> tuple[int, ...]:
        return self._type.shape

    @property
    def dtype(self) -> Any:
        return self._type.dtype

    @property
    def weak_type(self) -> bool:
        return self._type.weak_type

    @property
    def sharding(self) -> Any:
        return self._type.sharding

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self._type.size_bytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def is_deleted(self) -> bool:
        """Returns whether a step has donated it."""
        return not self._is_held

    def delete(self) -> None:
        """Has the tasks drop it."""
        is_there, self._is_held = self._is_held, False
        if is_there and self._incarnation == self._connection.incarnation:
            self._connection.free([[self._run, self._index, 1]], self._type.size_bytes)

    def donated(self) -> None:
        """Notes that a step has taken it."""
        self._is_held = False

    def ref(self, run: int) -> list[Any]:
        """Returns how run `run` names the array."""
        self._check_not_lost()
        if not self._is_held:
            raise TaskError(
                "an array has been donated to an earlier step",
                got=f"{self.dtype}{list(self.shape)}",
                hint="use the array that the step returned in its place",
            )
        return ["o", run - self._run, self._index, 1]

    def _check_not_lost(self) -> None:
        if self._incarnation != self._connection.incarnation:
            raise TaskError(
                "an array was lost with the tasks that held it", got=f"{self.dtype}{self.shape}"
            )

    def block_until_ready(self) -> RemoteArray:
        """Waits until the step that returns it has run, and raises if there is no value."""
        self._check_not_lost()
        self._connection.wait(self._run, self._incarnation)
        if self._is_held and self._connection.has_failed(self._run):
            self._fetched(only_look=True)
        return self

    def _fetched(self, *, only_look: bool = False) -> list[np.ndarray]:
        connection, now = self._connection, self._connection.runs
        what = [self.ref(now)], now, [self._stand_in], self._incarnation
        try:
            return fetch_refs(connection, *what, only_look=only_look)
        except TaskError:
            connection.check(self._run)  # It knows better.
            raise

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._value is None:
            (self._value,) = self._fetched()
        value = self._value if dtype is None else self._value.astype(dtype)
        return value.copy() if copy else value

    def __jax_array__(self) -> jax.Array:
        return jax.numpy.asarray(np.asarray(self))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(x) if isinstance(x, RemoteArray) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def item(self) -> Any:
        """Returns the value of an array of one element."""
        return np.asarray(self).item()

    def tolist(self) -> Any:
        """Returns the value as nested lists."""
        return np.asarray(self).tolist()

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __index__(self) -> int:
        return np.asarray(self).__index__()

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __iter__(self) -> Any:
        return iter(np.asarray(self))

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self)[()], spec)

    def __repr__(self) -> str:
        there = f"on the tasks, output {self._index} of run {self._run}"
        state = there if self._is_held else "donated"
        return f"RemoteArray({self.dtype.name}{list(self.shape)}, {state})"

    def __del__(self) -> None:
        if getattr(self, "_is_held", False):
            self.delete()


def fetch_refs(
    connection: Connection,
    refs: list[Any],
    run: int,
    stand_ins: list[jax.ShapeDtypeStruct],
    incarnation: int,
    *,
    only_look: bool = False,
) -> list[np.ndarray]:
    """Fetches what some references name, given the types of all arrays in turn.

    The other arguments are those of `Connection.fetch`.

    Raises:
        TaskError: the step that makes one has failed, or it was donated.
        RankLostError: the tasks were lost.
    """
    whole = all(_is_replicated(each) for each in stand_ins)
    count = 1 if whole else connection.about["tasks"]
    rows = connection.fetch(refs, run, count, incarnation, only_look=only_look)
    if whole or only_look:
        found = (data for _, _, data in sorted(rows, key=lambda row: row[0]))
        return [data.copy() if data.nbytes < 1 << 20 else data for data in found]
    made: list[Any] = [None] * len(stand_ins)
    for index, bounds, data in rows:
        if made[index] is None:
            shape = stand_ins[index].shape
            made[index] = np.empty((*shape, *data.shape[len(shape) :]), data.dtype)
        made[index][tuple(slice(*each) for each in bounds)] = data
    return made


def _is_replicated(stand_in: Any) -> bool:
    sharding = stand_in.sharding
    return sharding is None or not any(tuple(sharding.spec))
