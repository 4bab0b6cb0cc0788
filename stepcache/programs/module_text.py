"""Reads StableHLO text with source locations into operations, arguments, outputs and settings.

It is no parser: what it does not know stays text. Locations, and the numbers of values and private
functions, are left out. A constant is no operation: it belongs to the operation that reads it,
whose line is the one that a user knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

TYPE = re.compile(r"tensor<(?:[^<>]|<[^<>]*>)*>|![\w.]+")
NUMBER = re.compile(r"_\d+$")
_BRACES = r'\{(?:"(?:[^"\\]|\\.)*"|\{[^{}]*\}|[^{}"])*\}'
_STRING = r'"((?:[^"\\]|\\.)*)"'
_MODULE = re.compile(rf"module @(\S+)(?: attributes ({_BRACES}))?")
_SETTING = re.compile(r"(\w+) = ([^,{}]+?)(?: : i\d+)?[,}]")
_ARGUMENT = re.compile(
    rf"(%arg\d+): ({TYPE.pattern}) ?({_BRACES})?(?: ?loc\((?:{_STRING}|([#\w]+))\))?(?=[,)])"
)
_RESULT = re.compile(rf"({TYPE.pattern}) ?({_BRACES})?")
_RESULT_NAME = re.compile(rf"jax\.result_info = {_STRING},? ?")
_OPERATION = re.compile(r'(?:(%\w+)(?::\d+)? = )?"?([\w.]+)"?(?: @(\w+))?(.*)', re.DOTALL)
_OPERAND = re.compile(r"%\w+(?:#\d+)?")
_CARRIED = re.compile(r"%iterArg\w* = ")
_SIGNATURE = re.compile(r" : (?=\(|tensor<|!)")
_REGION_ARGUMENTS = re.compile(r"\(%\w+: .*\) \{$")
_APPLIED = re.compile(r" applies stablehlo\.(\w+)")
_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min", "multiply": "product"}
_NUMBERED = re.compile(r"@(\w+?)_\d+\b")
# A callback's number among those of the module; in older versions of JAX, its address.
_CALLBACK = re.compile(r'backend_config = (?:"\d+"|\{index = \d+ : ui64\}),? ?')
_FRAME = re.compile(rf"{_STRING}:(\d+):")
_NAMED = re.compile(rf"{_STRING}\((.*)\)$", re.DOTALL)
_MOST_FRAMES = 100  # JAX writes ten.

Frame = tuple[str, int, str]  # File, line and function.


class Value(NamedTuple):
    """What an operation reads: its `kind` is "argument", "constant", "result" or "begin"."""

    kind: str
    shown: str
    wire: str  # Tells the values of a function apart. Those of results shift with operations.
    maker: Operation | None = None


@dataclass(slots=True, eq=False)
class Operation:
    """One operation; `text` has its attributes and types, without operands."""

    name: str
    text: str
    operands: list[Value]
    function: str
    callee: str
    location: str

    @property
    def attributes(self) -> str:
        return _SIGNATURE.split(self.text)[0]

    @property
    def results(self) -> list[str]:
        """Types of the results. Where only operands have types, the last has that of the result."""
        _, arrow, types = _SIGNATURE.split(self.text)[-1].rpartition("-> ")
        return TYPE.findall(types) if arrow else TYPE.findall(types)[-1:]

    @property
    def constants(self) -> list[str]:
        return [value.shown for value in self.operands if value.kind == "constant"]


class ModuleText:
    """One module.

    Attributes:
        name: of the function.
        settings: attributes of the module and its mesh, by name.
        arguments: name, and type and attributes, of each.
        outputs: type and attributes by name, and what is returned if no operation makes it.
        functions: their operations. `callers` has the first call of each.
    """

    def __init__(self, text: str):
        self.name = ""
        self.settings: dict[str, str] = {}
        self.arguments: list[tuple[str, str]] = []
        self.outputs: dict[str, str] = {}
        self.functions: dict[str, list[Operation]] = {}
        self.callers: dict[str, Operation] = {}
        self._locations: dict[str, str] = {}
        self._located: dict[str, list[Frame]] = {}
        self._function = ""  # The function that is being read, and its values.
        self._values: dict[str, Value] = {}
        self._opened: list[tuple[str, Operation]] = []  # Regions: `cond`, and the operation.
        for line in text.splitlines():
            self._read(line.strip())

    def frames(self, operation: Operation) -> list[Frame]:
        """Returns the source lines of an operation, the innermost first.

        Operations of functions that JAX defines have none; those of the call follow.
        """
        found: list[Frame] = []
        functions: set[str] = set()
        following: Operation | None = operation
        while following and following.function not in functions:
            found += self._frames(following.location)
            functions.add(following.function)
            following = self.callers.get(following.function)
        return found

    def _frames(self, text: str) -> list[Frame]:
        if frame := _FRAME.match(text):
            return [(frame[1], int(frame[2]), "")]
        if named := _NAMED.match(text):
            inner = self._frames(named[2])
            return [(file, line, function or named[1]) for file, line, function in inner]
        found: list[Frame] = []
        for name in re.findall(r"#loc\d+", text):
            if name not in self._located:
                self._located[name] = []  # Ends a cycle.
                self._located[name] = self._frames(self._locations.get(name, ""))
            found += self._located[name]
        return found[:_MOST_FRAMES]

    def _read(self, line: str) -> None:
        if line.startswith("#loc"):
            name, _, location = line.partition(" = loc(")
            self._locations[name] = location.removesuffix(")")
        elif module := _MODULE.match(line):
            self.name = module[1].removeprefix("jit_")
            self.settings |= dict(_SETTING.findall(module[2] or ""))
        elif line.startswith("sdy.mesh "):
            mesh = line.partition(" = <")[2].partition("> {")[0]
            if not mesh.startswith("[]"):  # Those without axes are JAX's own.
                self.settings["mesh"] = mesh
        elif line.startswith("func.func "):
            self._read_function(line)
        elif line and line[0] not in "^)":
            location = ""
            if line[-1] == ")" and " loc(" in line:
                line, _, location = line[:-1].rpartition(" loc(")
            read = self._close_region if line[0] == "}" else self._read_operation
            read(line, location)

    def _read_function(self, line: str) -> None:
        named = re.search(r"@(\w+)\(", line)
        self._function = named[1] if named else ""
        self.functions[self._function], self._values, self._opened = [], {}, []
        if self._function != "main":
            return
        signature, _, results = line.rpartition(") -> ")
        for value, type, attributes, name, alias in _ARGUMENT.findall(f"{signature})"):
            name = name or self._locations.get(alias, "").strip('"') or str(len(self.arguments))
            self._values[value] = Value("argument", name, str(len(self.arguments)))
            self.arguments.append((f"argument {name}", f"{type}, {attributes}"))
        for place, (type, attributes) in enumerate(_RESULT.findall(results)):
            name = named[1] if (named := _RESULT_NAME.search(attributes)) else str(place)
            self.outputs[f"output {name}"] = f"{type}, {_RESULT_NAME.sub('', attributes)}"

    def _read_operation(self, line: str, location: str) -> None:
        if not (match := _OPERATION.match(line)):
            return
        result, name, callee, rest = match.groups("")
        listed = self.functions.setdefault(self._function, [])
        if not result and "." not in name and name not in ("return", "call"):
            self._opened += [(name, operation) for operation in listed[-1:]]  # `cond {`, of `while`
            return
        name = shown = name.rpartition(".")[2]
        rest = _REGION_ARGUMENTS.sub("{", rest)
        operands = [self._value(each) for each in _OPERAND.findall(_CARRIED.sub("", rest))]
        if name == "constant":
            self._values[result] = Value("constant", rest.strip(), rest)
            return
        if name in ("broadcast_in_dim", "convert", "reshape") and operands:
            if operands[0].kind == "constant":
                self._values[result] = operands[0]
                return
            shown = operands[0].shown
        elif callee:
            name = shown = NUMBER.sub("", callee).strip("_")
            if "callback" in callee:
                name = shown = "callback to Python"
        elif name == "compare":
            direction, _, rest = rest.partition(",")
            name += direction
        elif name == "reduce" and (applied := _APPLIED.search(rest)):
            name = shown = _REDUCTIONS.get(applied[1], f"reduce {applied[1]}")
            rest = rest[applied.end() :]
            # What a sum begins with goes without saying, unless it differs.
            operands[1::2] = [value._replace(kind="begin") for value in operands[1::2]]
        if self._opened and self._opened[-1][0] == "cond":
            name = f"loop condition {name}"
        text = _CALLBACK.sub("", _NUMBERED.sub(r"@\1", _OPERAND.sub("", rest)))
        operation = Operation(name, text, operands, self._function, callee, location)
        self._values[result] = Value("result", shown, str(len(listed)), operation)
        listed.append(operation)
        if callee:
            self.callers.setdefault(callee, operation)
        if line.endswith("{"):
            self._opened.append(("", operation))
        if name == "return" and self._function == "main":
            for output, value in zip(self.outputs, operands, strict=False):
                if value.kind != "result":
                    self.outputs[output] += f", {value.shown}"

    def _value(self, name: str) -> Value:
        base, numbered, number = name.partition("#")
        shown = "its argument" if base.startswith("%arg") else "a carried value"
        value = self._values.get(base, Value("result", shown, base))
        return value._replace(wire=f"{value.wire}#{number}") if numbered else value

    def _close_region(self, line: str, location: str) -> None:
        if self._opened:
            _, operation = self._opened.pop()
            operation.location = location or operation.location
            if line.endswith("{"):  # Another region of the operation follows, such as `do`.
                self._opened.append((line.strip("{} "), operation))
            else:
                operation.text += line.removeprefix("}")
