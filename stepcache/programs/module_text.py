"""Reads StableHLO text with source locations into operations, arguments, outputs and settings.

It is no parser: what it does not know stays text. Locations, and the numbers of values and private
functions, stay out. A constant is no operation of its own: it counts where an operation reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

TYPE = re.compile(r"tensor<(?:[^<>]|<[^<>]*>)*>|![\w.]+")
_BRACES = r'\{(?:"(?:[^"\\]|\\.)*"|\{[^{}]*\}|[^{}"])*\}'
_ARGUMENT = re.compile(
    rf'(%arg\d+): ({TYPE.pattern}) ?({_BRACES})?(?: ?loc\("?((?:[^"\\]|\\.)*?)"?\))?(?=[,)])'
)
_RESULT = re.compile(rf"({TYPE.pattern}) ?({_BRACES})?")
_RESULT_NAME = re.compile(r'jax\.result_info = "((?:[^"\\]|\\.)*)",? ?')
_MODULE = re.compile(rf"module @(\S+)(?: attributes ({_BRACES}))?")
_OPERATION = re.compile(r'(?:(%\w+)(?::\d+)? = )?"?([\w.]+)"?(?: @(\w+))?(.*)', re.DOTALL)
_OPERAND = re.compile(r"%\w+(?:#\d+)?")
_CARRIED = re.compile(r"%iterArg\w* = ")
_APPLIED = re.compile(r" applies stablehlo\.(\w+)")
_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min", "multiply": "product"}
NUMBER = re.compile(r"_\d+$")
_NUMBERED = re.compile(r"@(\w+?)_\d+\b")
# A callback's number among those of the module; in older versions of JAX, its address.
_CALLBACK = re.compile(r'backend_config = (?:"\d+"|\{index = \d+ : ui64\}),? ?')
_FRAME = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):')
_NAMED = re.compile(r'"((?:[^"\\]|\\.)*)"\((.*)\)$', re.DOTALL)


class Value(NamedTuple):
    """What an operation reads. Its `kind` is "argument", "constant" or "result"."""

    kind: str
    shown: str
    wire: str  # Tells the values of a function apart; most shift where an operation is added.


@dataclass(slots=True, eq=False)
class Operation:
    """One operation. `text` has its attributes and types, and no operands."""

    name: str
    text: str
    operands: list[Value]
    function: str
    location: str = ""
    callee: str = ""

    @property
    def constants(self) -> list[str]:
        return [value.shown for value in self.operands if value.kind == "constant"]


class Frame(NamedTuple):
    """A line of source."""

    file: str
    line: int
    function: str


class ModuleText:
    """One module.

    Attributes:
        name: of the function.
        inputs: its mesh, its attributes, and type and attributes of each argument, by name.
        arguments: how many arguments it has.
        outputs: type and attributes of each output, by name, and what is returned if that is no
            result of an operation.
        functions: the operations of each function.
        callers: the first call of each function.
    """

    def __init__(self, text: str):
        self.name = ""
        self.inputs: dict[str, str] = {}
        self.arguments = 0
        self.outputs: dict[str, str] = {}
        self.functions: dict[str, list[Operation]] = {}
        self.callers: dict[str, Operation] = {}
        self._locations: dict[str, str] = {}
        self._values: dict[str, Value] = {}  # Those of the function that is being read.
        self._opened: list[tuple[str, Operation]] = []  # Regions: `cond`, and what has the region.
        self._function = ""
        for line in text.splitlines():
            self._read(line.strip())

    def frames(self, operation: Operation) -> list[Frame]:
        """Source lines of an operation, the innermost first. Inside JAX, there may be none."""
        found, seen = [], set()
        while operation is not None and operation.function not in seen:
            found += self._frames(operation.location)
            seen.add(operation.function)
            operation = self.callers.get(operation.function)
        return found

    def _frames(self, text: str, depth: int = 0) -> list[Frame]:
        if depth > 200:
            return []
        if frame := _FRAME.match(text):
            return [Frame(frame[1], int(frame[2]), "")]
        if named := _NAMED.match(text):
            inner = self._frames(named[2], depth + 1)
            return [frame._replace(function=frame.function or named[1]) for frame in inner]
        names = re.findall(r"#loc\d+", text)
        return [f for name in names for f in self._frames(self._locations.get(name, ""), depth + 1)]

    def _read(self, line: str) -> None:
        body, _, location = line.rpartition(" loc(") if line.endswith(")") else (line, "", "")
        if line.startswith("#loc"):
            name, _, text = line.partition(" = loc(")
            self._locations[name] = text.removesuffix(")")
        elif module := _MODULE.match(line):
            self.name = module[1].removeprefix("jit_")
            self.inputs |= dict(re.findall(r"(\w+) = ([^,{}]+?)(?: : i\d+)?[,}]", module[2] or ""))
        elif line.startswith("sdy.mesh "):
            shape = line.partition(" = <")[2].partition("> {")[0]
            if not shape.startswith("[]"):  # JAX's own, for callbacks and keys.
                self.inputs["mesh"] = shape
        elif line.startswith("func.func "):
            self._read_function(line)
        elif line.startswith("}"):
            self._close_region(body or line, location)
        elif line and line[0] not in "^)":
            self._read_operation(body or line, location)

    def _read_function(self, line: str) -> None:
        named = re.search(r"@(\w+)\(", line)
        self._function = named[1] if named else ""
        self.functions[self._function], self._values = [], {}
        if self._function != "main":
            return
        signature, _, results = line.rpartition(") -> ")
        for place, (name, type, attributes, location) in enumerate(
            _ARGUMENT.findall(signature + ")")
        ):
            location = self._locations.get(location, location).strip('"')
            shown = location if location not in ("", "unknown") else f"argument {place}"
            self.inputs[f"argument {shown}"] = f"{type}, {attributes}"
            self.arguments += 1
            self._values[name] = Value("argument", shown, str(place))
        for place, (type, attributes) in enumerate(_RESULT.findall(results)):
            named = _RESULT_NAME.search(attributes)
            shown = named[1] if named else f"result {place}"
            self.outputs[f"output {shown}"] = f"{type}, {_RESULT_NAME.sub('', attributes)}"

    def _read_operation(self, line: str, location: str) -> None:
        match = _OPERATION.match(line)
        if not match:
            return
        result, name, callee, rest = match.groups("")
        listed = self.functions.setdefault(self._function, [])
        if not result and "." not in name and name not in ("return", "call"):
            if listed:  # Such as `cond {`: a region of the operation before.
                self._opened.append((name, listed[-1]))
            return
        operands = [self._value(each) for each in _OPERAND.findall(_CARRIED.sub("", rest))]
        name = name.rpartition(".")[2]
        shown = name
        if name == "constant":
            self._values[result] = Value("constant", rest.strip(), rest)
            return
        if name in ("broadcast_in_dim", "convert", "reshape") and operands:
            if operands[0].kind == "constant":
                self._values[result] = operands[0]
                return
            shown = operands[0].shown
        elif callee:
            shown = name = NUMBER.sub("", callee).strip("_")
            if "callback" in name:
                shown = name = "callback to Python"
        elif name == "compare":
            name += rest[: rest.find(",")]  # Such as `LT`.
        elif name == "reduce" and (applied := _APPLIED.search(rest)):
            # What a sum starts from goes without saying.
            shown = name = _REDUCTIONS.get(applied[1], f"reduce {applied[1]}")
            operands = operands[::2]
        if self._opened and self._opened[-1][0] == "cond":
            name = f"loop condition {name}"
        text = _CALLBACK.sub("", _NUMBERED.sub(r"@\1", _OPERAND.sub("", rest)))
        operation = Operation(name, text, operands, self._function, location, callee)
        self._values[result] = Value("result", shown, str(len(listed)))
        listed.append(operation)
        if line.endswith("{"):
            self._opened.append(("", operation))
        if callee:
            self.callers.setdefault(callee, operation)
        if name == "return" and self._function == "main":
            for output, value in zip(self.outputs, operands, strict=False):
                if value.kind != "result":
                    self.outputs[output] += f", {value.shown}"

    def _value(self, name: str) -> Value:
        base, numbered, number = name.partition("#")
        value = self._values.get(base, Value("result", "a value", base))
        return value._replace(wire=f"{value.wire}#{number}") if numbered else value

    def _close_region(self, line: str, location: str) -> None:
        if not self._opened:
            return
        label, operation = self._opened.pop()
        if line.endswith("{"):  # The next region of the same operation.
            self._opened.append((line.strip("{} "), operation))
            return
        operation.text += line.lstrip("}")
        operation.location = location or operation.location
