"""Reads StableHLO text with source locations into operations, arguments, outputs and settings.

It is no parser: what it does not know stays text. Locations and numbers of values are left out. A
constant belongs to the operation that reads it, whose line is the one that a user knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

_TYPE = r"tensor<(?:[^<>]|<[^<>]*>)*>|![\w.]+"
_STRING = r'"((?:[^"\\]|\\.)*)"'
_BRACES = rf"\{{((?:{_STRING}|\{{[^{{}}]*\}}|[^{{}}\"])*)\}}"
_DECLARED = re.compile(
    rf"(?:%arg\d+: )?({_TYPE}) ?(?:{_BRACES})?(?: ?loc\((?:{_STRING}|([#\w]+))\))?"
)
_RESULT_NAME = re.compile(rf"jax\.result_info = {_STRING},? ?")
_OPERATION = re.compile(r'(?:(%\w+)(?::\d+)? = )?"?([\w.]*)"?(?: @(\w+))?(.*)')
_OPERAND = re.compile(r"(%\w+)(#\d+)?(?: init: | = |, )?")
_NUMBERED = re.compile(r"@(\w+?)_\d+\b")
# A callback's number among those of the module; in older versions of JAX, its address.
_CALLBACK = re.compile(r'backend_config = (?:"\d+"|\{index = \d+ : ui64\}),? ?')
_LOCATION = re.compile(rf"(?:{_STRING}\()?(?:{_STRING}:(\d+):)?")  # "function"("file":line:…
_SHARDING = re.compile(r"(?:#sdy\.sharding)?<@\w+, \[((?:\{[^{}]*\}(?:, )?)*)\]([^<>]*)>")
_SHAPED = re.compile(r"tensor<((?:[\d?]+x)*)(\w+)>")
_DIALECT = re.compile(r"#?\b(?:stablehlo|mhlo|sdy)(?:\.|(?=<))|(?<=\w) : u?i\d+\b")


@dataclass(slots=True, eq=False)
class Operation:
    """One operation; `text` has its attributes and types, without operands."""

    name: str
    text: str
    constants: list[str]
    read: list[str]  # All that it reads. Numbers of results shift with operations before.
    function: str
    location: str
    key: int = 0  # The same for operations that are the same.

    @property
    def attributes_and_type(self) -> tuple[str, str]:
        attributes, _, types = self.text.rpartition(" : ")
        return attributes, types.rpartition("-> ")[2]


class ModuleText:
    """One module: its name, and the type and attributes of what it declares, by name."""

    def __init__(self, text: str):
        self.name = ""
        self.settings: dict[str, str] = {}
        self.arguments: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.operations: list[Operation] = []
        self._callers: dict[str, Operation] = {}  # The first call of each function.
        self._locations: dict[str, str] = {}
        self._located: dict[str, list[tuple[str, int, str]]] = {}
        self._function = ""  # The function that is being read, and its values.
        self._values: dict[str, str] = {}
        self._opened: list[tuple[str, Operation]] = []  # Regions: `cond`, and the operation.
        for line in text.splitlines():
            self._read(line.strip())

    def frames(self, operation: Operation) -> list[tuple[str, int, str]]:
        """Returns file, line and function: the innermost first, then of its function's call."""
        caller = self._callers.get(operation.function)
        return self._frames(operation.location) + (self.frames(caller) if caller else [])

    def _frames(self, text: str) -> list[tuple[str, int, str]]:
        function, file, line = _LOCATION.findall(text)[0]
        found = [(file, int(line), "")] if file else []
        for name in [] if file else re.findall(r"#loc\d+", text):
            if name not in self._located:
                self._located[name] = self._frames(self._locations.get(name, ""))
            found += self._located[name]
        return [(file, line, inner or function) for file, line, inner in found[:100]]

    def _read(self, line: str) -> None:
        if line.startswith("#loc"):
            name, _, location = line.partition(" = loc(")
            self._locations[name] = location.removesuffix(")")
        elif line.startswith("module @"):
            name, _, self.settings["module"] = line[8:].partition(" attributes ")
            self.name = name.removeprefix("jit_")
        elif line.startswith("sdy.mesh @mesh"):  # Others are JAX's own.
            self.settings["mesh"] = line.partition(" = <")[2].partition("> {")[0]
        elif line.startswith("func.func "):
            self._function = line.partition("@")[2].partition("(")[0]
            self._values, self._opened = {}, []
            if self._function == "main":
                arguments, _, results = line.rpartition(") -> ")
                self._declare("argument", arguments, self.arguments)
                self._declare("output", results, self.outputs)
        elif line and not line.startswith(("^", ")", "sdy.mesh ")):
            location = ""
            if line[-1] == ")" and " loc(" in line:
                line, _, location = line[:-1].rpartition(" loc(")
            if line[0] != "}":
                self._read_operation(line, location)
            elif self._opened:
                _, operation = self._opened.pop()
                operation.location = location or operation.location
                if line.endswith("{"):  # Another region of the operation follows, such as `do`.
                    self._opened.append((line.strip("{} "), operation))
                else:
                    operation.text += line.removeprefix("}")

    def _declare(self, kind: str, text: str, declared: dict[str, str]) -> None:
        for type, attributes, _, name, alias in _DECLARED.findall(text):
            result = _RESULT_NAME.search(attributes)
            name = name or self._locations.get(alias, "").strip('"') or (result and result[1])
            attributes = _RESULT_NAME.sub("", attributes)
            declared[f"{kind} {name or len(declared)}"] = f"{type}, {attributes}"

    def _read_operation(self, line: str, location: str) -> None:
        result, name, callee, text = _OPERATION.findall(line)[0]
        if not result and "." not in name and name not in ("return", "call"):
            self._opened += [(name, each) for each in self.operations[-1:]]  # `cond {`, of `while`
            return
        name = re.sub(r"_\d+$", "", callee).strip("_") or name.rpartition(".")[2]
        text = re.sub(r"\(%\w+: .*\) \{$", "{", text)
        read = [self._values.get(base, base) + number for base, number in _OPERAND.findall(text)]
        constants = [each for each in read if each.startswith("dense")]
        if name == "constant":
            self._values[result] = text.strip()
        elif name in ("broadcast_in_dim", "convert", "reshape") and constants:
            self._values[result] = constants[0]
        else:
            if self._opened and self._opened[-1][0] == "cond":
                name = f"loop condition {name}"
            text = _CALLBACK.sub("", _NUMBERED.sub(r"@\1", _OPERAND.sub("", text)))
            operation = Operation(name, text, constants, read, self._function, location)
            self._values[result] = str(len(self.operations))
            self.operations.append(operation)
            self._callers.setdefault(callee, operation)
            if line.endswith("{"):
                self._opened.append(("", operation))


def pieces_of(text: str, other: str = "") -> list[str]:
    """Returns types and attributes that another text does not have, written as JAX does."""
    text = re.sub(r"tf\.aliasing_output = \d+|jax\.buffer_donor = true", "donation = true", text)
    text = _SHARDING.sub(r"P(\1)\2", text).replace("{}", "None").replace("()", "")
    text = re.sub(r'\{("\w+")\}', r"\1", re.sub(r'\{("\w+", [^{}]*)\}', r"(\1)", text))
    text = _DIALECT.sub("", _SHAPED.sub(_type, text)).replace(" across", "")
    pieces = [each.strip(" ,") for each in re.split(r",? (?=\w+ ?=)|[{}]", text)]
    others = ["", *(pieces_of(other) if other else [])]
    return [piece for piece in pieces if piece not in others]


def _type(shaped: re.Match) -> str:
    name = re.sub(r"^(b?)f(?=\d)", r"\1float", shaped[2].lower())
    name = "bool" if name == "i1" else re.sub(r"^(u?)i(?=\d)", r"\1int", name)
    return f"{name}[{shaped[1].rstrip('x').replace('x', ',')}]"


def constant_in_words(text: str, other: str) -> str:
    """A number; or an array, by its first element that is not the same in another."""
    elements, others = _elements(text), _elements(other)
    if len(elements) == 1:
        return str(elements[0])
    pairs = enumerate(zip(elements, others, strict=False))
    place = next((place for place, (one, another) in pairs if one != another), 0)
    return f"{_SHAPED.sub(_type, text.rpartition(' : ')[2])} with [{place}] = {elements[place]!s}"


def _elements(text: str) -> np.ndarray | list[str]:
    """The elements of a constant, one if all are the same; or its text, if numpy cannot read it."""
    content, _, type = text.removeprefix("dense<").rpartition("> : ")
    try:
        dtype = np.dtype(_SHAPED.sub(_type, type).partition("[")[0])
        if content.startswith(("0x", '"0x')):  # Bits of a number, the highest first; or bytes.
            data = bytes.fromhex(content.strip('"')[2:])
            return np.frombuffer(data if content[0] == '"' else data[::-1], dtype)
        elements = re.findall(r"[^\[\], ]+", content)
        return np.array([float(each) if "." in each else int(each) for each in elements], dtype)
    except (TypeError, ValueError):
        return [content[:60]]
