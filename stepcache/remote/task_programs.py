"""The programs that a task compiles: steps of stepcache, over what a client has exported."""

from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding

import stepcache
from stepcache.jaxcompat.specs import decode_dtype, decode_spec, encode_spec
from stepcache.remote.task_arrays import Failed


class Program:
    """A program that a client has sent.

    Attributes:
        in_shardings: of each argument.
        outputs: how many there are.
        call: runs it.
    """

    def __init__(self, about: dict[str, Any], exported: bytes | bytearray, mesh: jax.sharding.Mesh):
        self._mesh = mesh

        def place(code: Any) -> NamedSharding | None:
            return None if code is None else NamedSharding(mesh, decode_spec(code))

        self.in_shardings = list(map(place, about["in"]))
        out_shardings = list(map(place, about["out"]))
        self._types = about["types"]

        def fun(*leaves):
            return export.deserialize(bytearray(exported)).call(*leaves)

        fun.__name__ = fun.__qualname__ = about["name"]
        self._session = stepcache.Session(mesh, data_axis=None)
        self._step = self._session.step(
            fun,
            donate_argnums=tuple(about["donate"]),
            in_shardings=tuple(self.in_shardings),
            out_shardings=out_shardings,
        )
        self.call = self._step
        self.outputs = len(out_shardings)
        self._carried = about["carried"]

    def outputs_of_failed(self, leaves: list[Any], failed: Failed) -> list[Any]:
        """Returns the outputs of a call that has failed: the carry is as it was given.

        `failed` stands for all other outputs, and for a carry that the call has donated.
        """
        outputs: list[Any] = [failed] * self.outputs
        for output, number in enumerate(self._carried):
            leaf = leaves[number]
            is_gone = not isinstance(leaf, Failed) and leaf.is_deleted()
            outputs[output] = failed if is_gone else leaf
        return outputs

    def compile(self) -> list[Any]:
        """Compiles the program, or loads it. Returns the spec of each output."""
        stand_ins = [
            jax.ShapeDtypeStruct(tuple(shape), decode_dtype(dtype), sharding=at)
            for (dtype, shape), at in zip(self._types, self.in_shardings, strict=True)
        ]
        with self._session:
            program = self._step._engine.warm(tuple(stand_ins), {})
        assert program is not None
        return [encode_spec(each.spec) for each in program.run.output_shardings]
