"""Changes of what Python's own library reads, of the user's objects or of what it keeps itself."""

from .kinds import Kind

SHOWN_OR_COMPARED = [
    *(
        Kind(
            f"namespace_{name}",
            f"""
            import argparse, types
            SPACE, OTHER = {kind}(rate="ab"), {kind}(rate="ab«¦c»")
            SPACES = [SPACE]
            def step(x): return x * ({code})
            """,
            "OTHER.rate",
        )
        for kind, name, code in (
            ("types.SimpleNamespace", "by_repr", "len(repr(OTHER))"),
            ("types.SimpleNamespace", "in_a_text", 'len(f"{OTHER}")'),
            ("types.SimpleNamespace", "after_percent", 'len("%s" % OTHER)'),
            ("types.SimpleNamespace", "that_is_equal", "2 if SPACE == OTHER else 3"),
            ("types.SimpleNamespace", "in_a_list", "2 if OTHER in SPACES else 3"),
            ("types.SimpleNamespace", "counted_in_a_list", "2 + SPACES.count(OTHER)"),
            ("argparse.Namespace", "of_arguments_by_repr", "len(repr(OTHER))"),
            ("argparse.Namespace", "of_arguments_in_a_text", 'len(f"{OTHER}")'),
            ("argparse.Namespace", "of_arguments_that_is_equal", "2 if SPACE == OTHER else 3"),
            ("argparse.Namespace", "of_arguments_in_a_list", "2 if OTHER in SPACES else 3"),
        )
    ),
    Kind(
        "namespace_printed_by_python",
        """
        import pprint, types
        SPACE = types.SimpleNamespace(rate="«2¦33»")
        def step(x): return x * len(pprint.pformat(SPACE))
        """,
        "SPACE.rate",
    ),
    Kind(
        "names_in_a_namespace_of_arguments",
        """
        import argparse
        SPACE = argparse.Namespace(«rate¦rates»=2)
        def step(x): return x * (2 if "ra" + "te"[:len(x)] in SPACE else 3)
        """,
        "SPACE.rate",
    ),
    Kind(
        "namespace_of_a_class",
        """
        import types
        class Config(types.SimpleNamespace): pass
        CONFIG = Config(rate="«2¦33»")
        def step(x): return x * len(str(CONFIG))
        """,
        "CONFIG.rate",
    ),
]

READ_BY_IT = [
    Kind(
        "keys_that_a_dict_asks_for",
        """
        class Pairs:
            def __iter__(self): return iter([("a", 2.0)])
            def __getitem__(self, key): return 3.0
            «¦keys = staticmethod(["a"].copy)»
        PAIRS = Pairs()
        def step(x): return x * dict(PAIRS)["a"]
        """,
        "Pairs.keys",
    ),
    Kind(
        "attribute_read_by_json",
        """
        import functools, json
        class Source: read = staticmethod(functools.partial(str, "«2.0¦3.0»"))
        SOURCE = Source()
        def step(x): return x * json.load(SOURCE)
        """,
        "Source.read",
    ),
    Kind(
        "dialect_of_csv",
        """
        import csv
        class Dialect:
            delimiter, quotechar, lineterminator = "«;¦|»", '"', ""
            doublequote, escapechar, quoting, skipinitialspace = True, None, 0, False
        def step(x): return x * len(next(csv.reader(["a;b|c|d"], Dialect)))
        """,
        "Dialect.delimiter",
    ),
    Kind(
        "instance_as_dialect_of_csv",
        """
        from csv import DictReader
        class Dialect:
            quotechar, lineterminator = '"', ""
            doublequote, escapechar, quoting, skipinitialspace = True, None, 0, False
        DIALECT = Dialect()
        DIALECT.delimiter = "«;¦|»"
        def step(x): return x * len(DictReader(["a;b|c|d"], dialect=DIALECT).fieldnames)
        """,
        "DIALECT.delimiter",
    ),
]

KEPT_BY_IT = [
    Kind(
        "registered_dialect_of_csv",
        """
        import csv
        csv.register_dialect("ours", delimiter="«;¦|»")
        def restore(): csv.unregister_dialect("ours")
        def step(x): return x * len(next(csv.reader(["a;b|c|d"], "ours")))
        """,
        "csv (dialects)['ours']",
    ),
    Kind(
        "registered_dialect_of_a_dict_reader",
        """
        from csv import DictReader, register_dialect, unregister_dialect
        register_dialect("of_dicts", delimiter="«;¦|»")
        def restore(): unregister_dialect("of_dicts")
        def step(x): return x * len(DictReader(["a;b|c|d"], dialect="of_dicts").fieldnames)
        """,
        "csv (dialects)['of_dicts']",
    ),
    Kind(
        "limit_of_csv",
        """
        import csv
        LIMIT = csv.field_size_limit(«200¦300»)
        def restore(): csv.field_size_limit(LIMIT)
        def step(x): return x * csv.field_size_limit()
        """,
        "csv (limit)",
    ),
    Kind(
        "name_of_a_level",
        """
        import logging
        logging.addLevelName(15, "«ab¦abc»")
        def step(x): return x * len(logging.getLevelName(15))
        """,
        "logging.getLevelName",
        vouched=False,
    ),
    Kind(
        "prefix_of_a_namespace",
        """
        import xml.etree.ElementTree as tree
        tree.register_namespace("«ab¦abc»", "http://x")
        def step(x): return x * len(tree.tostring(tree.Element("{http://x}a")))
        """,
        "xml.etree.ElementTree.tostring",
        vouched=False,
    ),
    Kind(
        "overloads",
        """
        import typing
        @typing.overload
        def f(x: int): ...
        «¦@typing.overload»
        def f(x: str): ...
        def f(x): return x
        def step(x): return x * (1 + len(typing.get_overloads(f)))
        """,
        "typing.get_overloads",
        vouched=False,
    ),
    Kind(
        "state_of_a_lock",
        """
        import threading
        LOCK = threading.Lock()
        «¦LOCK.acquire()»
        def step(x): return x * (2 if LOCK.locked() else 3)
        """,
        "LOCK.locked()",
    ),
    *(
        Kind(
            f"a_type_variable_s_{name}",
            f"""
            from typing import Literal, NewType, TypeVar
            KIND = {made}
            def step(x): return x * {read}
            """,
            "KIND",
        )
        for name, made, read in (
            ("bound", 'TypeVar("K", bound=Literal[«2¦3»])', "KIND.__bound__.__args__[0]"),
            (
                "constraint",
                'TypeVar("K", Literal[«2¦3»], int)',
                "KIND.__constraints__[0].__args__[0]",
            ),
            ("name", 'NewType("K«2¦3»", float)', "int(KIND.__name__[1:])"),
        )
    ),
    *(
        Kind(
            f"{name}_that_a_function_was_given",
            f"""
            def f(): pass
            f.__{name}__ = "«ab¦abc»"
            def step(x): return x * len(f.__{name}__)
            """,
            f"f.__{name}__",
        )
        for name in ("name", "module")
    ),
    Kind(
        "type_of_a_file_name",
        """
        import mimetypes
        mimetypes.add_type("a/«b¦bc»", ".of_a_test")
        def step(x): return x * len(mimetypes.guess_type("x.of_a_test")[0])
        """,
        "mimetypes.guess_type",
        vouched=False,
    ),
    Kind(
        "print_options_of_numpy",
        """
        A = np.array([0.123456789])
        def context(): return np.printoptions(precision=«3¦5»)
        def step(x): return x * len(str(A))
        """,
        "format_options",
    ),
]
