"""Operations, types and constants of StableHLO in the words of JAX's users."""

from __future__ import annotations

import re
import struct

from stepcache.programs.module_text import TYPE, Operation

_DTYPES = {"bf16": "bfloat16", "i1": "bool", "complex<f32>": "complex64"}
_DTYPES |= {"complex<f64>": "complex128"}
_LINKS = {"multiply": "by", "divide": "by", "add": "", "subtract": "", "power": "to the power"}
_REVERSED = {"divide": "into", "subtract": "from"}  # Where the constant is the first operand.
_SHARDING = re.compile(r"(?:#sdy\.sharding)?<@\w+, \[((?:\{[^{}]*\}(?:, )?)*)\]([^<>]*)>")
_DONATED = re.compile(r"tf\.aliasing_output = \d+ : i32|jax\.buffer_donor = true")
_EMPTY = re.compile(r"\((?:[\s,]|init:)*\)")  # Where the operands were.
_ARRAY = re.compile(r"array<i\d+: ?([^>]*)>")
_DIALECT = re.compile(r"#?\b(?:stablehlo|mhlo|sdy)(?:\.|(?=<))|(?<=\w) : u?i\d+\b")
_PIECE = re.compile(
    r'(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\((?:[^()]|\([^()]*\))*\)|"[^"]*"|[^,\[("])+'
)
_SIGNATURE = re.compile(r" : (?=\(|tensor<|!)")
_CONSTANT = re.compile(r"dense<(.*)> : (tensor<(?:.*x)?(.+?)>)$", re.DOTALL)
_FORMATS = {"f16": "e", "f32": "f", "f64": "d", "bf16": "f", "i1": "?"}
_FORMATS |= {"i8": "b", "i16": "h", "i32": "i", "i64": "q"}
_FORMATS |= {"ui8": "B", "ui16": "H", "ui32": "I", "ui64": "Q"}
_MOST_ELEMENTS = 1 << 20  # Of a constant, that are compared one by one.


def in_words(operation: Operation | None, other: Operation | None = None) -> str:
    """Returns an operation in words; beside another of the same name, what differs from it."""
    if operation is None:
        return "absent"
    type = _type(operation)
    if other is None or other.name != operation.name:
        return _joined(operation.name, type, *_constants(operation, None))
    words = [type] if type != _type(other) else []
    if operation.constants != other.constants:
        words += _constants(operation, other)
    words.append(apart(_attributes(operation), _attributes(other)))
    if not any(words):
        words = ["of", " and ".join(value.shown for value in operation.operands)]
    return _joined(operation.name, *words)


def apart(text: str, other: str) -> str:
    """Returns the attributes that another text does not have, or says that they are missing."""
    pieces, others = pieces_of(text), pieces_of(other)
    own = [piece for piece in pieces if piece not in others]
    missing = [piece for piece in others if piece not in pieces]
    if not own and missing == ["donated"]:
        own = ["not donated"]
    return ", ".join(own or [f"no {piece.partition(' = ')[0]}" for piece in missing])


def pieces_of(text: str) -> list[str]:
    """Returns types and attributes, each as JAX or Python would write it."""
    text = _SHARDING.sub(_partition_spec, _DONATED.sub("donated", text))
    text = TYPE.sub(_readable_type, _ARRAY.sub(r"[\1]", _EMPTY.sub("", text)))
    pieces = _PIECE.findall(_DIALECT.sub("", text))
    return [stripped for piece in pieces if (stripped := piece.strip(" {}<>"))]


def _joined(*words: str) -> str:
    return " ".join(word for word in words if word)


def _attributes(operation: Operation) -> str:
    return _SIGNATURE.split(operation.text)[0]


def _type(operation: Operation) -> str:
    """The types of the results; where only operands' types are written, the last of them."""
    *_, signature = _SIGNATURE.split(operation.text)
    _, arrow, results = signature.rpartition("-> ")
    types = TYPE.findall(results)
    return ", ".join(TYPE.sub(_readable_type, each) for each in (types if arrow else types[-1:]))


def _readable_type(type: re.Match) -> str:
    """`float32[8,128]`, as JAX writes types."""
    match = re.match(r"tensor<((?:(?:\d+|\?)x)*)([^,]*?)(?:, .*)?>$", type[0])
    if not match:
        return type[0].removeprefix("!stablehlo.")
    sizes, element = match.groups()
    number = re.match(r"(u?)(i|f)(\d+)$", element)
    if element not in _DTYPES and number:
        element = number[1] + {"i": "int", "f": "float"}[number[2]] + number[3]
    return f"{_DTYPES.get(element, element.lower())}[{sizes.rstrip('x').replace('x', ',')}]"


def _partition_spec(sharding: re.Match) -> str:
    axes = []
    for names in re.findall(r"\{([^{}]*)\}", sharding[1]):
        quoted = [f"'{name}'" for name in re.findall(r'"([^"]*)"', names)]
        axes.append(
            quoted[0] if len(quoted) == 1 else f"({', '.join(quoted)})" if quoted else "None"
        )
        if "?" in names:
            axes[-1] = "UNCONSTRAINED"
    return f"P({', '.join(axes)}){sharding[2].replace(',', ' and')}"


def _constants(operation: Operation, other: Operation | None) -> list[str]:
    """The constants that an operation reads, with the word that joins each to the operation."""
    shown = []
    name = operation.name.removeprefix("loop condition ")
    others = iter(other.constants if other else ())
    for place, value in enumerate(operation.operands):
        if value.kind == "constant":
            links = _REVERSED if place == 0 and name in _REVERSED else _LINKS
            text = _constant(value.shown, next(others, ""))
            shown.append(_joined("and" if shown else links.get(name, "with"), text))
    return shown


def _constant(text: str, other: str) -> str:
    """A number, or an array; beside another array of the same type, the first element that differs."""
    parsed = _CONSTANT.search(text)
    if not parsed:
        return text
    elements, element = _elements(parsed), parsed[3]
    if len(elements) == 1:
        return _number(elements[0], element)
    type = TYPE.sub(_readable_type, parsed[2])
    parsed_other = _CONSTANT.search(other)
    if parsed_other and parsed_other[2] == parsed[2]:
        pairs = enumerate(zip(elements, _elements(parsed_other), strict=False))
        unequal = [place for place, (one, other) in pairs if one != other]
        if unequal:
            more = f" and {len(unequal) - 1} others" if len(unequal) > 1 else ""
            index = _index(unequal[0], type)
            return f"{type} with {index} = {_number(elements[unequal[0]], element)}{more}"
    first = ", ".join(_number(each, element) for each in elements[:3])
    return f"{type} of {first}, …"


def _elements(constant: re.Match) -> list[bytes] | list[str]:
    """The elements of a constant, not decoded. A large one is written as its bytes."""
    text, _, element = constant.groups()
    if not text.startswith('"0x'):
        return re.findall(r"\([^()]*\)|[^\[\],\s]+", text)
    size = max(1, int(re.sub(r"\D", "", element) or 8) // 8)
    content = bytes.fromhex(text[3 : 3 + 2 * size * _MOST_ELEMENTS].rstrip('"'))
    return [content[place : place + size] for place in range(0, len(content), size)]


def _number(text: str | bytes, element: str) -> str:
    if isinstance(text, str) and text.startswith("0x"):
        text = bytes.fromhex(text[2:])[::-1]
    if isinstance(text, str):
        return repr(float(text)) if "f" in element and text[-1] != ")" else text
    if element not in _FORMATS:
        return text.hex()
    padding = b"\0\0" if element == "bf16" else b""
    (value,) = struct.unpack(f"<{_FORMATS[element]}", padding + text)
    if element != "f32" or value != value:
        return repr(value)
    digits = (f"{value:.{count}g}" for count in (6, 7, 8, 9))
    return repr(float(next(d for d in digits if struct.pack("<f", float(d)) == padding + text)))


def _index(place: int, type: str) -> str:
    index = []
    for size in map(int, reversed(type.partition("[")[2].rstrip("]").split(","))):
        place, position = divmod(place, size)
        index.insert(0, str(position))
    return f"[{','.join(index)}]"
