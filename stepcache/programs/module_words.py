"""Operations, types, attributes and constants of StableHLO in the words of JAX's users."""

from __future__ import annotations

import re

import numpy as np

from stepcache.programs.module_text import TYPE, Operation

_LINKS = {"multiply": "by", "divide": "by", "add": "", "subtract": ""}
_REVERSED = {"divide": "into", "subtract": "from"}  # Where the constant is the first operand.
_NAMES = {"convert": "convert to", "manual_computation": "shard_map"}
_DTYPES = {"bf16": "bfloat16", "i1": "bool"}
_DTYPES |= {"complex<f32>": "complex64", "complex<f64>": "complex128"}
_SHARDING = re.compile(r"(?:#sdy\.sharding)?<@\w+, \[((?:\{[^{}]*\}(?:, )?)*)\]([^<>]*)>")
_DONATED = re.compile(r"tf\.aliasing_output = \d+ : i32|jax\.buffer_donor = true")
_EMPTY = re.compile(r"\((?:[\s,]|init:)*\)")  # Where the operands were.
_INTEGERS = re.compile(r"array<i\d+: ?([^>]*)>")
_DIALECT = re.compile(r"#?\b(?:stablehlo|mhlo|sdy)(?:\.|(?=<))|(?<=\w) : u?i\d+\b")
_NESTED = r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\((?:[^()]|\([^()]*\))*\)"
_PIECE = re.compile(rf'(?:{_NESTED}|"[^"]*"|[^,\[("])+')
_BRACE = re.compile(r'("[^"]*")|(?:^[\w.]+ = )?\{|\}')
_SHAPED = re.compile(r"tensor<((?:[\d?]+x)*)([^,]*?)(?:, .*)?>$")
_ELEMENT = re.compile(r"\([^()]*\)|[^\[\],\s]+")
_CONSTANT = re.compile(r"dense<(.*)> : (tensor<.*>)$", re.DOTALL)


def in_words(operation: Operation | None, other: Operation | None) -> str:
    """Returns an operation in words, as far as it differs from another."""
    if operation is None:
        return "absent"
    type = ", ".join(TYPE.sub(_readable_type, each) for each in operation.results)
    words = []
    if other is None or operation.name != other.name:
        words = [_constants(operation, None), type if other is None else ""]
    else:
        if operation.constants != other.constants:
            words.append(_constants(operation, other))
        words.append(apart(operation.attributes, other.attributes))
        if operation.results != other.results:
            words.append(type)
        if not any(words):
            words = [f"of {' and '.join(_constant(v.shown, '') for v in operation.operands)}"]
    return f"{_NAMES.get(operation.name, operation.name)} {', '.join(filter(None, words))}".strip()


def apart(text: str, other: str) -> str:
    """Returns the attributes that another text does not have, or says which are missing."""
    pieces, others = pieces_of(text), pieces_of(other)
    own = [piece for piece in pieces if piece not in others]
    missing = ["no " + piece.partition(" = ")[0] for piece in others if piece not in pieces]
    return ", ".join(own or missing).replace("no donated", "not donated")


def pieces_of(text: str) -> list[str]:
    """Returns types and attributes, each as JAX or Python would write it."""
    text = _SHARDING.sub(_partition_spec, _DONATED.sub("donated", text))
    text = (
        text.replace("across dimensions =", "over axes")
        .replace("] out", "], out")
        .replace("] manual", "], manual")
    )
    text = _DIALECT.sub("", _INTEGERS.sub(r"[\1]", _EMPTY.sub("", text)))
    pieces = [piece.strip(" <>") for piece in _PIECE.findall(TYPE.sub(_readable_type, text))]
    pieces = [_BRACE.sub(lambda found: found[1] or "", each).strip() for each in pieces]
    return [piece for piece in pieces if piece]


def _readable_type(type: re.Match) -> str:
    """`float32[8,128]`, as JAX writes types."""
    match = _SHAPED.match(type[0])
    if not match:
        return type[0].removeprefix("!stablehlo.")
    return f"{_dtype(match[2])}[{match[1].rstrip('x').replace('x', ',')}]"


def _dtype(element: str) -> str:
    number = re.match(r"(u?)(i|f)(\d+)$", element)
    if not number or element in _DTYPES:
        return _DTYPES.get(element, element.lower())
    return f"{number[1]}{'int' if number[2] == 'i' else 'float'}{number[3]}"


def _partition_spec(sharding: re.Match) -> str:
    """`P('data', None)`."""
    axes = []
    for names in re.findall(r"\{([^{}]*)\}", sharding[1]):
        quoted = [f"'{name}'" for name in re.findall(r'"([^"]*)"', names)]
        axes.append(f"({', '.join(quoted)})" if len(quoted) > 1 else "".join(quoted) or "None")
        if "?" in names:
            axes[-1] = "UNCONSTRAINED" if not quoted else f"{axes[-1]} or more"
    return f"P({', '.join(axes)}){sharding[2].replace(',', ' with')}"


def _constants(operation: Operation, other: Operation | None) -> str:
    """The constants that an operation reads, with words that join them to it."""
    shown = ""
    others = iter(other.constants if other else ())
    for place, value in enumerate(operation.operands):
        if value.kind == "constant":
            links = _REVERSED if place == 0 and operation.name in _REVERSED else _LINKS
            link = " and" if shown else links.get(operation.name, "with")
            shown += f"{link} {_constant(value.shown, next(others, ''))}"
    return shown.strip()


def _constant(text: str, other: str) -> str:
    """A number, or an array; beside another array of the same type, where they differ."""
    array, other_array = _array(text), _array(other)
    if array is None:
        return text
    if array.ndim == 0:
        return str(array)
    type = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    alike = (array.dtype, array.shape)
    if other_array is not None and alike == (other_array.dtype, other_array.shape):
        # Bytes are compared, as a NaN is not equal to itself.
        rows, others = (each.reshape(-1, 1).view(np.uint8) for each in (array, other_array))
        unequal = np.flatnonzero((rows != others).any(1))
        if len(unequal):
            index = np.unravel_index(unequal[0], array.shape)
            more = f" and {len(unequal) - 1} others" if len(unequal) > 1 else ""
            return f"{type} with [{','.join(map(str, index))}] = {array[index]!s}{more}"
    return f"{type} of {', '.join(map(str, array.ravel()[:3]))}, …"


def _array(text: str) -> np.ndarray | None:
    """A constant as an array; one that repeats a single number, as that number."""
    constant = _CONSTANT.search(text)
    if constant is None or (shaped := _SHAPED.match(constant[2])) is None:
        return None
    content, dtype = constant[1], np.dtype(_dtype(shaped[2]))
    shape = [int(size) for size in shaped[1].split("x")[:-1]]
    if content.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(content[3:-1]), dtype).reshape(shape)
    elements = [_element(each, dtype) for each in _ELEMENT.findall(content)]
    return np.array(elements).astype(dtype).reshape(shape if "[" in content else ())


def _element(text: str, dtype: np.dtype) -> bool | int | complex | np.generic:
    if text.startswith("0x"):  # The bits of an infinity or a NaN, the highest first.
        return np.frombuffer(bytes.fromhex(text[2:])[::-1], dtype)[0]
    if text.startswith("("):
        return complex(*map(float, text.strip("()").split(",")))
    if text in ("true", "false"):
        return text == "true"
    return float(text) if "." in text else int(text)
