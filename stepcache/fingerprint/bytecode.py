"""What names a piece of code reads: globals, captured variables, imports, each with its attributes.

Pure: bytecode in, names out. Nothing is looked up here, and nothing is run.
"""

from __future__ import annotations

import ast
import dis
import functools
from collections.abc import Container
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from stepcache.fingerprint.instructions import (
    LOADS_ATTRIBUTE,
    LOADS_GLOBAL,
    attribute_asked_for,
    begins_with_bases,
    instructions_of,
    mere_counts,
    mere_keys,
    only_compares,
    passes_on_what_it_is_asked_for,
    simple_arguments,
    where_classes_are_tested,
)

_CAPTURED = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
# Code that names one of these may read attributes that it does not name. Not among them is what
# runs code of Python's, as `dataclasses.replace` does: a recording sees whose fields that reads.
# Most code that names `replace` or `copy` means that of a text, an array or a pytree.
DYNAMIC_ACCESS = frozenset(
    "getattr hasattr vars dir locals globals eval exec __dict__ __getattr__ __getattribute__ "
    "__getstate__ attrgetter methodcaller getattr_static getmembers deepcopy dump dumps loads "
    "__reduce__ __reduce_ex__ __slots__ __dataclass_fields__ __attrs_attrs__ __match_args__ "
    "f_globals f_locals modules format format_map vformat".split()
)
# What is no part of the code, so that a change of it would not be seen.
UNSEEN = {
    "__doc__": "docstrings",
    "__annotations__": "annotations",
    "annotation": "annotations",
    "return_annotation": "annotations",
    "get_type_hints": "annotations",
    "__globals__": "the globals of a function",
    "__subclasses__": "the classes that exist",
    "co_filename": "where code stands",
    "co_firstlineno": "where code stands",
    "co_lines": "where code stands",
    "co_positions": "where code stands",
    "f_back": "the frames of running code",
    "cell_contents": "the variables of other functions",
    "memory_stats": "amounts of memory in use",
    "live_arrays": "the arrays that exist",
}
# What code may do with an object to which each attribute of the object matters, if that is a
# namespace of Python's: they stand among the names that code reads.
SHOWS_NAMESPACES = "show or compare types.SimpleNamespace"
SHOWS_ARGUMENTS = "show or compare argparse.Namespace"
# What code may do that names Python's `type`, and not only to compare: `config.type` is none of it.
MAKES_ANY = "make an object of the class of another one"
# What code may do that names an attribute in which ml_collections keeps all settings.
READS_SETTINGS = "read all settings"
_OF_SETTINGS = frozenset(("_fields", "_configdict"))
_SHOWING = frozenset("repr str format print ascii index count remove".split())
LOCAL_ACCESS = frozenset(("locals", "vars", "eval", "exec", "dir", "co_varnames", "f_locals"))


@dataclass(frozen=True, slots=True)
class Read:
    """One chain of names that code reads: `config.optimizer["rate"]`, or `config.get("rate")`."""

    kind: str  # "global" or "captured".
    name: str  # The variable.
    attributes: tuple[str, ...]  # Read from it, in order.
    # Constants by which it is then subscripted, in order; or the one that `get` is asked for, which
    # is the last attribute then.
    keys: tuple[str, ...] = ()
    tests: bool = False  # Only whether something is an instance of the class that it leads to.


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement inside a function."""

    level: int  # 0 for an absolute one, else the dots before the name.
    module: str  # The name as written.
    names: tuple[str, ...]  # Of `from module import names`; empty for `import module`.
    # Chains read from the module that `import module` bound.
    attributes: tuple[tuple[str, ...], ...] = ()
    whole: bool = False  # The module may be used in other ways than by an attribute.


@dataclass(slots=True)
class Names:
    """What one code object reads, those nested in it included."""

    # Chains that start at a global or at a captured variable.
    reads: dict[Read, None] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)
    # Every attribute name, and every string that is no mere key: what it may read of an object.
    attributes: set[str] = field(default_factory=set)
    # Attributes among them of which it reads keys alone: see `Read.keys`.
    keys: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    # Those among them that are more than the name of an argument in a call.
    accessed: set[str] = field(default_factory=set)
    # The attribute names among them that it reads of anything.
    loads: set[str] = field(default_factory=set)
    # Chains to what it asks for attributes by computed names: `getattr(jax.nn, activation)`.
    asked: set[Read] = field(default_factory=set)
    codes: list[CodeType] = field(default_factory=list)  # The code objects covered.

    @property
    def is_dynamic(self) -> bool:
        """Whether it may read attributes beyond those."""
        return not self.accessed.isdisjoint(DYNAMIC_ACCESS)


_CLASS_OF = frozenset(("type", "__class__"))
_NAMED = frozenset(dis.hasname + dis.hasfree)


@functools.lru_cache(maxsize=512)
def names_of(code: CodeType) -> Names:
    """The names that `code` reads. Not to be changed."""
    names = Names()
    whole: set[str] = set()
    _collect(code, names, set(), whole)
    for name in whole & names.keys.keys():
        del names.keys[name]
    return names


def _collect(code: CodeType, names: Names, outer_locals: set[str], whole: set[str]) -> None:
    names.codes.append(code)
    own_cells = outer_locals | set(code.co_cellvars)
    instructions = instructions_of(code)
    keywords = _keywords(code.co_consts, instructions)
    compared = {name for name in _CLASS_OF & {*code.co_names} if only_compares(instructions, name)}
    own = {code.co_name} if begins_with_bases(code, instructions) else set()
    counts = mere_counts(instructions)
    names.attributes.update({*code.co_names} - compared - own - counts, *keywords)
    has_type = any(each.argval == "type" and each.opname in LOADS_GLOBAL for each in instructions)
    if has_type and "type" not in compared:
        names.attributes.add(MAKES_ANY)
    builtins = _BUILTINS & {*code.co_names}
    passed_on = {code.co_name} & {"__getattr__"}  # As `super().__getattr__(name)` does.
    names.accessed.update({*code.co_names} - builtins - passed_on)
    for name in builtins:
        _collect_builtin(name, code, instructions, names, own_cells)
    if any(each.opname == "MATCH_CLASS" and each.arg for each in instructions):
        names.accessed.add("__match_args__")  # It has patterns without the names of attributes.
    if _shows_objects(code, instructions):
        names.attributes.add(SHOWS_NAMESPACES)
    if not _OF_SETTINGS.isdisjoint(code.co_names):
        names.attributes.add(READS_SETTINGS)
    constants = tuple(each for each in code.co_consts if not any(each is k for k in keywords))
    _collect_constants(constants, names, own_cells, whole, mere_keys(code))
    tested = where_classes_are_tested(code, instructions)
    bound: dict[str, tuple[int, str]] = {}  # local name -> the module imported as it
    chains: dict[tuple[int, str], set[tuple[str, ...]]] = {}
    for index, instruction in enumerate(instructions):
        operation, argument = instruction.opname, instruction.argval
        if counts and argument in counts and instruction.opcode in _NAMED:
            continue
        if instruction.opcode in dis.hasname:
            is_load = operation in LOADS_ATTRIBUTE or operation in LOADS_GLOBAL
            if is_load and (all_keys := _all_keys(code, instructions, index)):
                names.keys.setdefault(argument, set()).update(all_keys)
            else:
                whole.add(argument)
        if operation in LOADS_GLOBAL or (operation in _CAPTURED and argument not in own_cells):
            chain = _chain(instructions, index)
            keys = _keys(instructions, index + len(chain) - (chain[-1:] == ("get",)))
            kind = "global" if operation in LOADS_GLOBAL else "captured"
            names.reads[Read(kind, argument, chain, keys, instruction.offset in tested)] = None
        elif operation in LOADS_ATTRIBUTE or operation == "IMPORT_FROM":
            names.loads.add(argument)
        elif operation == "IMPORT_NAME":
            _collect_import(instructions, index, names, bound)
        elif operation.startswith("LOAD_FAST") and argument in bound:
            chains.setdefault(bound[argument], set()).add(_chain(instructions, index))
    for level, module in bound.values():
        found = tuple(sorted(chains.get((level, module), set()) - {()}))
        names.imports.append(Import(level, module, (), found, whole=True))


def _collect_constants(
    constants: tuple, names: Names, own_cells: set[str], whole: set[str], keys: Container[Any]
) -> None:
    for constant in constants:
        if isinstance(constant, CodeType):
            _collect(constant, names, own_cells, whole)
        elif isinstance(constant, str) and constant.isidentifier():
            if constant not in keys:
                names.attributes.add(constant)
            names.accessed.add(constant)
            whole.add(constant)
        elif isinstance(constant, tuple):
            as_keys = constant if constant in keys else ()
            _collect_constants(constant, names, own_cells, whole, as_keys)


def _collect_builtin(
    name: str,
    code: CodeType,
    instructions: list[dis.Instruction],
    names: Names,
    own_cells: set[str],
) -> None:
    """Collects what a function of Python's reads of objects, and of which.

    An attribute of the same name is not that function: a walk finds it wherever it is kept.
    """
    for index, each in enumerate(instructions):
        if each.opcode not in dis.hasname or each.argval != name or each.opname in _OF_ATTRIBUTES:
            continue
        following = instructions[index + 1 :] if each.opname in LOADS_GLOBAL else []
        attribute = attribute_asked_for(following) if name in _BY_NAME and following else None
        asked = _asked(following, own_cells) if name == "getattr" and following else None
        if attribute is not None:
            names.loads.add(attribute)
        elif asked is not None:
            names.asked.add(asked)
        elif name != "getattr" or not passes_on_what_it_is_asked_for(code, following):
            names.accessed.add(name)


def _asked(following: list[dis.Instruction], own_cells: set[str]) -> Read | None:
    """The chain to what a call of `getattr` asks, if it starts at a global or captured variable."""
    arguments = simple_arguments(following)
    if len(arguments) not in (2, 3):
        return None
    start, *attributes = arguments[0]
    is_captured = start.opname in _CAPTURED and start.argval not in own_cells
    if start.opname not in LOADS_GLOBAL and not is_captured:
        return None
    kind = "captured" if is_captured else "global"
    return Read(kind, start.argval, tuple(each.argval for each in attributes))


_OF_ATTRIBUTES = LOADS_ATTRIBUTE | {"STORE_ATTR", "DELETE_ATTR"}
_BUILTINS = frozenset("getattr hasattr vars dir locals globals eval exec".split())
_BY_NAME = frozenset(("getattr", "hasattr"))


def _keywords(constants: tuple, instructions: list[dis.Instruction]) -> list[tuple[str, ...]]:
    """Constants that are the names of arguments in calls, and nothing else."""
    following = [*(i.opname for i in instructions[1:]), ""]
    keywords, others = [], []
    for instruction, after in zip(instructions, following, strict=True):
        if instruction.opname not in ("KW_NAMES", "LOAD_CONST"):
            continue
        constant = constants[instruction.arg or 0]  # Python 3.11 does not show that of KW_NAMES.
        is_call = instruction.opname == "KW_NAMES" or after == "CALL_KW"  # Until 3.12, and later.
        (keywords if is_call and isinstance(constant, tuple) else others).append(constant)
    return [each for each in keywords if not any(each is other for other in others)]


def _shows_objects(code: CodeType, instructions: list[dis.Instruction]) -> bool:
    """Whether code may make a text of a whole object, or compare it with another one.

    Nothing asks a namespace for its attributes where the right operand is a constant.
    """
    if not _SHOWING.isdisjoint(code.co_names):
        return True
    for index, instruction in enumerate(instructions):
        operation = instruction.opname
        if operation.startswith("FORMAT_"):
            return True
        # How far before it the operand is loaded that may be a constant.
        distance = 2 if operation == "CONTAINS_OP" else 1 if _compares(instruction) else 0
        if distance and instructions[max(0, index - distance)].opname != "LOAD_CONST":
            return True
    return False


def _compares(instruction: dis.Instruction) -> bool:
    """Whether an instruction is `==`, `!=` or `%`."""
    if instruction.opname == "COMPARE_OP":
        return "==" in instruction.argrepr or "!=" in instruction.argrepr
    return instruction.opname == "BINARY_OP" and instruction.argrepr.startswith("%")


def _chain(instructions: list[dis.Instruction], index: int) -> tuple[str, ...]:
    attributes = []
    for instruction in instructions[index + 1 :]:
        if instruction.opname not in LOADS_ATTRIBUTE:
            break
        attributes.append(instruction.argval)
    return tuple(attributes)


def _all_keys(
    code: CodeType, instructions: list[dis.Instruction], index: int
) -> set[tuple[str, ...]]:
    """The keys by which code reads what the instruction at `index` loads; none if it may read all.

    It does so at once, or from a local variable of its own that stands for nothing else.
    """
    if keys := _keys(instructions, index):
        return {keys}
    store = instructions[min(index + 1, len(instructions) - 1)]
    if store.opname != "STORE_FAST" or store.is_jump_target or store.argval in parameters_of(code):
        return set()
    if not LOCAL_ACCESS.isdisjoint(code.co_names):
        return set()
    found = {
        _keys(instructions, at) if each.opname in _LOADS_VARIABLE else ()
        for at, each in enumerate(instructions)
        if each is not store and each.argval == store.argval and "_FAST" in each.opname
    }
    return set() if () in found else found


_LOADS_VARIABLE = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW")


def parameters_of(code: CodeType) -> tuple[str, ...]:
    """The names by which code is called, those of `*args` and `**kwargs` included."""
    flags = code.co_flags
    count = code.co_argcount + code.co_kwonlyargcount + bool(flags & 4) + bool(flags & 8)
    return code.co_varnames[:count]


def _keys(instructions: list[dis.Instruction], index: int) -> tuple[str, ...]:
    """The constants by which code reads a dictionary that the instruction at `index` loads.

    It subscripts the dictionary and what it finds, or asks the dictionary's `get` for one.
    """
    keys: list[str] = []
    for at in range(index + 1, len(instructions) - 1, 2):
        load, subscript = instructions[at : at + 2]
        is_read = subscript.opname == "BINARY_SUBSCR" or subscript.argrepr == "[]"
        if not (_is_text(load) and is_read) or subscript.is_jump_target:
            break
        keys.append(load.argval)
    return tuple(keys) or _asked_for(instructions[index + 1 : index + 5])


def _asked_for(instructions: list[dis.Instruction]) -> tuple[str, ...]:
    """The constant that code asks a method `get` for, if it does, with or without a default."""
    if len(instructions) < 3:
        return ()
    method, key, *others = instructions
    if method.opname not in LOADS_ATTRIBUTE or method.argval != "get" or not _is_text(key):
        return ()
    calls = [(each.opname, each.arg) for each in others]
    has_default = others[0].opname.startswith("LOAD_") and calls[1:] == [("CALL", 2)]
    return (key.argval,) if has_default or calls[0] == ("CALL", 1) else ()


def _is_text(load: dis.Instruction) -> bool:
    return load.opname == "LOAD_CONST" and isinstance(load.argval, str)


def _collect_import(
    instructions: list[dis.Instruction], index: int, names: Names, bound: dict
) -> None:
    module = instructions[index].argval
    before = [i.argval for i in instructions[max(0, index - 2) : index]]
    level, from_names = before if len(before) == 2 else (0, None)
    level = level if isinstance(level, int) else 0
    following = instructions[index + 1] if index + 1 < len(instructions) else None
    if from_names:
        names.imports.append(Import(level, module, tuple(from_names)))
    elif following is not None and following.opname.startswith("STORE_FAST"):
        bound[following.argval] = (level, module.partition(".")[0])
        names.imports.append(Import(level, module, ()))
    else:  # Kept in a cell, under a global name, or `import a.b as c`: all of it may be read.
        names.imports.append(Import(level, module, (), whole=True))


def module_aliases(tree: ast.Module) -> dict[str, tuple[int, str, tuple[str, ...]]]:
    """The names that the imports of a module bind: level, module and attributes of each."""
    aliases: dict[str, tuple[int, str, tuple[str, ...]]] = {}
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # It grows meanwhile.
        if isinstance(node, ast.Import):
            for each in node.names:  # `import a.b` binds a, and `import a.b as c` binds a.b.
                bound = each.name if each.asname else each.name.partition(".")[0]
                aliases[each.asname or bound] = (0, bound, ())
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                aliases[each.asname or each.name] = (node.level, node.module or "", (each.name,))
        elif not isinstance(node, _NAMESPACES):
            nodes += ast.iter_child_nodes(node)
    return aliases


_NAMESPACES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
