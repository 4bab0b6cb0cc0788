"""Changes that make another program, or that may: none of them may be answered by the old one."""

from .kinds import Kind

CODE = [
    Kind("step_body", "def step(x): return x * «2¦3»", "step_body.py:step"),
    Kind(
        "callee", "def scale(x): return x * «2¦3»\ndef step(x): return scale(x)", "callee.py:scale"
    ),
    Kind(
        "callee_of_callee",
        """
        def inner(x): return x * «2¦3»
        def outer(x): return inner(x) + 1
        def step(x): return outer(x)
        """,
        "callee_of_callee.py:inner",
    ),
    Kind(
        "nested_function",
        """
        def step(x):
            def inner(x):
                return x * «2¦3»
            return inner(x)
        """,
        "nested_function.py:step",
    ),
    Kind("lambda_global", "scale = lambda x: x * «2¦3»\ndef step(x): return scale(x)", "<lambda>"),
    Kind("lambda_step", "step = lambda x: x * «2¦3»", "<lambda>"),
    Kind(
        "two_lambdas_on_one_line",
        "both = (lambda x: x * 2, lambda x: x * «3¦4»)\ndef step(x): return both[0](both[1](x))",
        "<lambda>",
    ),
    Kind(
        "closure_value",
        """
        def make(rate):
            def step(x): return x * rate
            return step
        step = make(«2.0¦3.0»)
        """,
        "step, rate",
    ),
    Kind(
        "closure_of_a_closure",
        """
        def make(rate):
            def inner(x): return x * rate
            def step(x): return inner(x)
            return step
        step = make(«2.0¦3.0»)
        """,
        "inner, rate",
    ),
    Kind(
        "closure_function",
        """
        def make(function):
            def step(x): return function(x)
            return step
        def double(x): return x * 2
        def treble(x): return x * 3
        step = make(«double¦treble»)
        """,
        "make.<locals>.step, function",
    ),
    Kind(
        "default",
        "def scale(x, rate=«2.0¦3.0»): return x * rate\ndef step(x): return scale(x)",
        "default rate",
    ),
    Kind(
        "keyword_default",
        "def scale(x, *, rate=«2.0¦3.0»): return x * rate\ndef step(x): return scale(x)",
        "default rate",
    ),
    Kind(
        "mutable_default",
        "def scale(x, rates=[2.0, «2.0¦3.0»]): return x * rates[1]\ndef step(x): return scale(x)",
        "default rates",
    ),
    Kind(
        "decorator_body",
        """
        def deco(function):
            def wrapped(x): return function(x) * «2¦3»
            return wrapped
        @deco
        def step(x): return x + 1
        """,
        "wrapped",
    ),
    Kind(
        "decorator_argument",
        """
        import functools
        def deco(rate):
            def outer(function):
                @functools.wraps(function)
                def wrapped(x): return function(x) * rate
                return wrapped
            return outer
        @deco(«2.0¦3.0»)
        def step(x): return x + 1
        """,
        "rate",
    ),
    Kind(
        "wrapped_function",
        """
        import functools
        def deco(function):
            @functools.wraps(function)
            def wrapped(x): return function(x)
            return wrapped
        @deco
        def step(x): return x * «2¦3»
        """,
        "step",
    ),
    Kind(
        "partial_argument",
        "import functools\ndef scale(rate, x): return x * rate\n"
        "step = functools.partial(scale, «2.0¦3.0»)",
        "args",
    ),
    Kind(
        "partial_keyword",
        "import functools\ndef scale(x, rate): return x * rate\n"
        "step = functools.partial(scale, rate=«2.0¦3.0»)",
        "rate",
    ),
    Kind(
        "jax_partial",
        "def scale(rate, x): return x * rate\nhelper = jax.tree_util.Partial(scale, «2.0¦3.0»)\n"
        "def step(x): return helper(x)",
        "helper",
    ),
    Kind(
        "partial_subclass",
        """
        import functools
        class Mine(functools.partial): pass
        def scale(rate, x): return x * rate
        helper = Mine(scale, «2.0¦3.0»)
        def step(x): return helper(x)
        """,
        "helper",
    ),
    Kind(
        "partialmethod",
        """
        import functools
        class Model:
            def scale(self, rate, x): return x * rate
            double = functools.partialmethod(scale, «2.0¦3.0»)
        model = Model()
        def step(x): return model.double(x)
        """,
        "Model.double",
    ),
    Kind(
        "generator_function",
        """
        def rates():
            yield 1.0
            yield «2.0¦3.0»
        def step(x): return sum(x * rate for rate in rates())
        """,
        "rates",
    ),
    Kind(
        "same_name_in_two_modules",
        """
        import other
        def scale(x): return x * 2
        def step(x): return scale(x) + other.scale(x)
        # --- other.py
        def scale(x): return x * «3¦4»
        """,
        "other.py:scale",
    ),
    Kind(
        "same_file_name_in_two_packages",
        """
        from first import util as a
        from second import util as b
        def step(x): return a.scale(x) + b.scale(x)
        # --- first/util.py
        def scale(x): return x * 2
        # --- second/util.py
        def scale(x): return x * «3¦4»
        """,
        "second/util.py:scale",
    ),
    Kind(
        "another_file_same_function_name",
        """
        from «one¦two» import scale
        def step(x): return scale(x)
        # --- one.py
        def scale(x): return x * 2
        # --- two.py
        def scale(x): return x * 3
        """,
        "scale",
    ),
    Kind(
        "relative_import",
        """
        from relative_pkg.a import step
        # --- relative_pkg/__init__.py
        # --- relative_pkg/a.py
        def step(x):
            from .b import scale
            return scale(x)
        # --- relative_pkg/b.py
        def scale(x): return x * «2¦3»
        """,
        "relative_pkg/b.py:scale",
    ),
    Kind(
        "import_inside",
        """
        def step(x):
            import import_inside_other
            return x * import_inside_other.RATE
        # --- import_inside_other.py
        RATE = «2.0¦3.0»
        """,
        "RATE",
    ),
    Kind(
        "import_of_all_inside",
        """
        import import_of_all_values
        def step(x):
            import import_of_all_user
            return x * import_of_all_user.scale()
        # --- import_of_all_user.py
        from import_of_all_values import *
        def scale(): return RATE
        # --- import_of_all_values.py
        RATE = «2.0¦3.0»
        """,
        "RATE",
    ),
    Kind(
        "import_as_inside",
        """
        def step(x):
            import import_as_inside_pkg.sub as s
            return s.scale(x)
        # --- import_as_inside_pkg/__init__.py
        # --- import_as_inside_pkg/sub.py
        def scale(x): return x * «2¦3»
        """,
        "import_as_inside_pkg/sub.py:scale",
    ),
    Kind(
        "module_passed_around",
        """
        import passed_module
        def use(module, x): return x * module.RATE
        def step(x):
            alias = passed_module
            return use(alias, x)
        # --- passed_module.py
        RATE = «2.0¦3.0»
        """,
        "RATE",
    ),
    Kind(
        "module_in_a_dict",
        """
        import module_in_dict
        MODULES = {"a": module_in_dict}
        def step(x): return x * MODULES["a"].RATE
        # --- module_in_dict.py
        RATE = «2.0¦3.0»
        """,
        "RATE",
    ),
    Kind(
        "module_reloaded",
        """
        import importlib, reloaded_module
        if «0¦1»:
            Path(reloaded_module.__file__).write_text("RATE = 30.5")
            importlib.invalidate_caches()
            importlib.reload(reloaded_module)
        def step(x): return x * reloaded_module.RATE
        # --- reloaded_module.py
        RATE = 2.0
        """,
        "RATE",
    ),
    Kind(
        "module_getattr",
        """
        import lazy_module
        def step(x): return x * lazy_module.rate
        # --- lazy_module.py
        def __getattr__(name):
            if name == "rate": return «2.0¦3.0»
            raise AttributeError(name)
        """,
        "rate",
    ),
    Kind(
        "monkeypatched_user_module",
        """
        import patched_module
        def mine(x): return x * 3
        if «0¦1»: patched_module.scale = mine
        def step(x): return patched_module.scale(x)
        # --- patched_module.py
        def scale(x): return x * 2
        """,
        "scale",
    ),
    Kind(
        "replaced_code_object",
        """
        def mine(x): return x * 3
        def scale(x): return x * 2
        if «0¦1»: scale.__code__ = mine.__code__
        def step(x): return scale(x)
        """,
        "scale",
    ),
    Kind(
        "exec_source",
        """
        space = {"RATE": 1.0}
        exec("def scale(x): return x * «2¦3» * RATE", space)
        scale = space["scale"]
        def step(x): return scale(x)
        """,
        "scale",
    ),
    Kind(
        "exec_two_namespaces",
        """
        one, two = {"RATE": «2.0¦7.0»}, {"RATE": 5.0}
        for space in (one, two):
            exec("def scale(x): return x * RATE", space)
        first, second = one["scale"], two["scale"]
        def step(x): return first(x) + second(x)
        """,
        "RATE",
    ),
    Kind(
        "notebook_cell",
        """
        space = {"__name__": "__main__", "jnp": jnp}
        cell = "RATE = «2.0¦3.0»\\ndef step(x): return x * RATE"
        exec(compile(cell, "<ipython-input-1-abc>", "exec"), space)
        step = space["step"]
        """,
        "RATE",
    ),
    Kind(
        "ipykernel_cell",
        """
        space = {"__name__": "__main__", "jnp": jnp}
        cell = "def scale(x): return x * «2¦3»\\ndef step(x): return scale(x)"
        exec(compile(cell, "/tmp/ipykernel_«123¦456»/789.py", "exec"), space)
        step = space["step"]
        """,
        "scale",
    ),
    Kind(
        "eval_string", 'TEXT = "x * «2¦3»"\ndef step(x): return eval(TEXT)', "eval", vouched=False
    ),
    Kind(
        "eval_alias",
        'TEXT = "x * «2¦3»"\nrun = eval\ndef step(x): return run(TEXT, {"x": x})',
        "eval",
        vouched=False,
    ),
    Kind(
        "exec_inside",
        'TEXT = "y = x * «2¦3»"\ndef step(x):\n    space = {"x": x}\n    exec(TEXT, space)\n'
        '    return space["y"]',
        "exec",
        vouched=False,
    ),
    Kind(
        "docstring_read",
        'def scale(x):\n    "«2¦3»"\n    return x\n'
        "def step(x): return scale(x) * float(scale.__doc__)",
        "__doc__",
        vouched=False,
    ),
    Kind(
        "annotation_read",
        "class Config:\n    rate: «2.0¦3.0»\n"
        'def step(x): return x * Config.__annotations__["rate"]',
        "__annotations__",
        vouched=False,
    ),
    Kind(
        "annotation_of_a_function_read",
        'def scale(x: «2.0¦3.0»): return x\ndef step(x): return x * scale.__annotations__["x"]',
        "__annotations__",
        vouched=False,
    ),
    Kind(
        "line_number_read",
        "«¦\n\n»def step(x): return x * step.__code__.co_firstlineno",
        "co_firstlineno",
        vouched=False,
    ),
    Kind(
        "file_name_read",
        "def step(x): return x * len(Path(__file__).parent.name) * «2¦3»",
        "file_name_read.py:step",
    ),
    Kind(
        "singledispatch",
        """
        import functools
        @functools.singledispatch
        def scale(kind, x): return x
        @scale.register
        def _(kind: int, x): return x * «2¦3»
        def step(x): return scale(1, x)
        """,
        "singledispatch",
    ),
    Kind(
        "singledispatch_of_another_class",
        """
        import functools
        @functools.singledispatch
        def scale(kind, x): return x
        @scale.register
        def _(kind: «int¦float», x): return x * 2
        def step(x): return scale(1, x)
        """,
        "singledispatch_of_another_class.py",
    ),
    Kind(
        "recursion",
        """
        def fold(x, depth):
            return x if depth == 0 else fold(x * «2¦3», depth - 1)
        def step(x): return fold(x, 3)
        """,
        "fold",
    ),
    Kind(
        "conditional_branch",
        """
        FLAG = «True¦False»
        def step(x): return x * 2 if FLAG else x * 3
        """,
        "FLAG",
    ),
    Kind(
        "exception_text",
        """
        LIMIT = «2¦30»
        def check(x):
            if x.shape[0] > LIMIT: raise ValueError
            return x * 2
        def step(x):
            try: return check(x)
            except ValueError: return x * 5
        """,
        "LIMIT",
    ),
    Kind(
        "context_manager",
        """
        import contextlib
        RATE = 1.0
        @contextlib.contextmanager
        def at(rate):
            global RATE
            before, RATE = RATE, rate
            try: yield
            finally: RATE = before
        def step(x):
            with at(«2.0¦3.0»): return x * RATE
        """,
        "context_manager.py:step",
    ),
    Kind(
        "global_assigned",
        """
        COUNT = «0¦1»
        def step(x):
            global COUNT
            COUNT += 1
            return x * COUNT
        """,
        "COUNT",
        vouched=False,
        unstable=True,
    ),
    Kind(
        "global_deleted",
        """
        «RATE = 3.0¦»
        def step(x):
            try: return x * RATE
            except NameError: return x * 2.0
        """,
        "RATE",
    ),
    Kind(
        "builtin_shadowed",
        """
        «¦def abs(x): return x * 3»
        def step(x): return abs(-x)
        """,
        "abs",
    ),
    Kind(
        "match_class",
        """
        class Point:
            __match_args__ = («"x", "y"¦"y", "x"»)
            def __init__(self): self.x, self.y = 2.0, 3.0
        point = Point()
        def step(x):
            match point:
                case Point(a, b): return x * a + b
        """,
        "__match_args__",
    ),
]

VALUES = [
    Kind("global_int", "RATE = «2¦3»\ndef step(x): return x * RATE", "RATE"),
    Kind("global_float", "RATE = «2.0¦2.5»\ndef step(x): return x * RATE", "RATE"),
    Kind(
        "global_bool_for_int",
        "RATE = «1¦True»\ndef step(x): return x * (5 if RATE is True else 2)",
        "RATE",
    ),
    Kind("negative_zero", "RATE = «0.0¦-0.0»\ndef step(x): return jnp.copysign(x, RATE)", "RATE"),
    Kind("long_string", 'TEXT = "a" * 5000 + "«b¦cc»"\ndef step(x): return x * len(TEXT)', "TEXT"),
    Kind("global_list", "RATES = [1.0, «2.0¦3.0»]\ndef step(x): return x * RATES[1]", "RATES[1]"),
    Kind(
        "long_list",
        "RATES = [1.0] * 500 + [«2.0¦3.0»]\ndef step(x): return x * RATES[500]",
        "RATES",
    ),
    Kind(
        "global_dict", 'RATES = {"a": «2.0¦3.0»}\ndef step(x): return x * RATES["a"]', "RATES['a']"
    ),
    Kind(
        "nested_dict",
        'RATES = {"a": {"b": [1, {"c": «2.0¦3.0»}]}}\n'
        'def step(x): return x * RATES["a"]["b"][1]["c"]',
        "RATES['a']['b'][1]['c']",
    ),
    Kind(
        "dict_order",
        "RATES = {«'a': 2.0, 'b': 3.0¦'b': 3.0, 'a': 2.0»}\n"
        "def step(x): return x * list(RATES.values())[0]",
        "RATES (order)",
    ),
    Kind(
        "dict_subclass",
        'class Mine(dict): pass\nRATES = Mine(a=«2.0¦3.0»)\ndef step(x): return x * RATES["a"]',
        "RATES",
    ),
    Kind(
        "dict_subclass_order",
        "class Mine(dict): pass\n"
        "RATES = Mine(«a=2.0, b=3.0¦b=3.0, a=2.0»)\n"
        "def step(x): return x * list(RATES.values())[0]",
        "RATES",
    ),
    Kind(
        "default_dict",
        "import collections\nRATES = collections.defaultdict(lambda: «2.0¦3.0»)\n"
        'def step(x): return x * dict.get(RATES, "a", RATES.default_factory())',
        "lambda",
    ),
    Kind(
        "counter",
        'import collections\nC = collections.Counter("a«a¦b»")\ndef step(x): return x * C["a"]',
        "C",
    ),
    Kind(
        "deque",
        "import collections\nC = collections.deque([1.0, «2.0¦3.0»])\ndef step(x): return x * C[1]",
        "C[1]",
    ),
    Kind("global_set", "CHOSEN = {1, «2¦3»}\ndef step(x): return x * sum(CHOSEN)", "CHOSEN"),
    Kind(
        "set_of_strings",
        'CHOSEN = {"a", "«b¦c»"}\ndef step(x): return x * (2 if "b" in CHOSEN else 3)',
        "CHOSEN",
    ),
    Kind(
        "frozen_set",
        "CHOSEN = frozenset({1, «2¦3»})\ndef step(x): return x * sum(CHOSEN)",
        "CHOSEN",
    ),
    Kind(
        "numpy_array",
        "RATES = np.array([1.0, «2.0¦3.0»])\ndef step(x): return x * RATES[1]",
        "RATES",
    ),
    Kind(
        "numpy_dtype",
        "RATE = np.array(2, np.«int32¦float32»)\n"
        "def step(x): return x.astype(int) / 4 * (RATE.dtype.itemsize + (RATE.dtype.kind == 'f'))",
        "RATE",
    ),
    Kind("numpy_scalar", "RATE = np.float32(«2¦3»)\ndef step(x): return x * RATE", "RATE"),
    Kind(
        "numpy_of_objects",
        "RATES = np.array([«2.0¦3.0», 'a'], object)\ndef step(x): return x * RATES[0]",
        "RATES[0]",
    ),
    Kind(
        "numpy_masked",
        "RATES = np.ma.masked_array([2.0, 3.0], mask=[0, «0¦1»])\n"
        "def step(x): return x * float(RATES.sum())",
        "RATES",
    ),
    Kind(
        "numpy_structured",
        'RATES = np.array([(1, «2.0¦3.0»)], [("a", int), ("b", float)])\n'
        'def step(x): return x * RATES["b"][0]',
        "RATES",
    ),
    Kind(
        "big_array",
        "DATA = np.zeros(300000); DATA[299999] = «2¦3»\ndef step(x): return x * DATA.max()",
        "DATA",
    ),
    Kind(
        "jax_array",
        "RATES = jnp.array([1.0, «2.0¦3.0»])\ndef step(x): return x * RATES[1]",
        "RATES",
    ),
    Kind(
        "jax_array_weak_type",
        "RATE = jnp.asarray(2.0«, jnp.float32¦»)\n"
        "def step(x): return (x.astype(jnp.bfloat16) * RATE).dtype.itemsize * x",
        "RATE",
    ),
    Kind(
        "random_key",
        "KEY = jax.random.key(«0¦1»)\ndef step(x): return x * jax.random.uniform(KEY)",
        "KEY",
    ),
    Kind(
        "random_key_impl",
        'KEY = jax.random.key(0, impl="«threefry2x32¦rbg»")\n'
        "def step(x): return x * jax.random.uniform(KEY)",
        "KEY",
    ),
    Kind(
        "array_array",
        'import array\nRATES = array.array("d", [1.0, «2.0¦3.0»])\n'
        "def step(x): return x * RATES[1]",
        "RATES",
    ),
    Kind("byte_array", "RATES = bytearray([1, «2¦3»])\ndef step(x): return x * RATES[1]", "RATES"),
    Kind(
        "struct_format",
        'import struct\nS = struct.Struct("<«d¦f»")\ndef step(x): return x * S.size',
        "S",
    ),
    Kind(
        "regular_expression",
        'import re\nR = re.compile("«a¦b»")\ndef step(x): return x * (2 if R.match("a") else 3)',
        "R",
    ),
    Kind(
        "long_regular_expression",
        'import re\nR = re.compile("a|" * 200 + "«bb¦cc»$")\n'
        'def step(x): return x * (2 if R.fullmatch("bb") else 3)',
        "R",
    ),
    Kind("range_and_slice", "CUT = slice(0, «2¦3»)\ndef step(x): return x[CUT].sum()", "CUT"),
    Kind(
        "decimal_number",
        'from decimal import Decimal\nD = Decimal("«2¦3»")\ndef step(x): return x * float(D)',
        "D",
    ),
    Kind(
        "date",
        "import datetime\nD = datetime.date(2020, 1, «2¦3»)\ndef step(x): return x * D.day",
        "D",
    ),
    Kind("path", 'P = Path("«aa¦bbb»")\ndef step(x): return x * len(P.name)', "P"),
    Kind(
        "path_like_of_the_user",
        """
        class Place:
            def __init__(self, rate): self.rate = rate
            def __fspath__(self): return "p"
            def __repr__(self): return "p"
        PLACE = Place(«2.0¦3.0»)
        def step(x): return x * PLACE.rate
        """,
        "PLACE.rate",
    ),
    Kind(
        "float_subclass_that_hides",
        """
        class Mine(float):
            def __repr__(self): return "hidden"
        RATE = Mine(«2.0¦3.0»)
        def step(x): return x * float(RATE)
        """,
        "RATE",
    ),
    Kind(
        "int_subclass_attribute",
        """
        class Mine(int): pass
        RATE = Mine(2); RATE.more = «2.0¦3.0»
        def step(x): return x * RATE.more
        """,
        "RATE.more",
    ),
    Kind(
        "simple_namespace",
        "import types\nC = types.SimpleNamespace(rate=«2.0¦3.0»)\ndef step(x): return x * C.rate",
        "C",
    ),
    Kind(
        "argparse_namespace",
        "import argparse\nC = argparse.Namespace(rate=«2.0¦3.0»)\ndef step(x): return x * C.rate",
        "C.rate",
    ),
    Kind(
        "same_object_twice",
        """
        A = [2.0]
        B = «A¦[2.0]»
        def step(x): return x * (2 if A is B else 3)
        """,
        "B",
    ),
    Kind(
        "iterator",
        "IT = iter([«2.0¦3.0», 1.0])\ndef step(x): return x * next(IT)",
        "IT",
        vouched=False,
        unstable=True,
    ),
    Kind(
        "iterator_that_is_copied",
        """
        import copy
        IT = iter([«2.0¦3.0», 1.0])
        def step(x): return x * next(copy.copy(IT))
        """,
        "IT",
    ),
    Kind(
        "generator",
        "GEN = (each for each in («2.0¦3.0», 1.0))\ndef step(x): return x * next(GEN)",
        "GEN",
        vouched=False,
        unstable=True,
    ),
    Kind(
        "open_file",
        """
        FILE = (Path(__file__).parent / "data.txt").open()
        def step(x):
            FILE.seek(0)
            return x * float(FILE.read())
        # --- data.txt
        «2.0¦3.0»
        """,
        "FILE",
        vouched=False,
    ),
    Kind(
        "enum_value",
        """
        import enum
        class Rate(enum.Enum):
            LOW = «2.0¦3.0»
        def step(x): return x * Rate.LOW.value
        """,
        "Rate.LOW",
    ),
    Kind(
        "enum_member",
        """
        import enum
        class Rate(enum.Enum):
            LOW = 2.0
            HIGH = 3.0
        CHOSEN = Rate.«LOW¦HIGH»
        def step(x): return x * (2 if CHOSEN is Rate.LOW else 3)
        """,
        "CHOSEN",
    ),
    Kind(
        "enum_order",
        """
        import enum
        class Rate(enum.Enum):
            «LOW = 2.0; HIGH = 3.0¦HIGH = 3.0; LOW = 2.0»
        def step(x): return x * next(iter(Rate)).value
        """,
        "Rate",
    ),
    Kind(
        "int_flag",
        """
        import enum
        class F(enum.IntFlag):
            A = 1
            B = 2
        CHOSEN = F.A«¦ | F.B»
        def step(x): return x * int(CHOSEN)
        """,
        "CHOSEN",
    ),
    Kind(
        "context_variable",
        """
        import contextvars
        RATE = contextvars.ContextVar("rate", default=1.0)
        RATE.set(«2.0¦3.0»)
        def step(x): return x * RATE.get()
        """,
        "RATE",
    ),
    Kind(
        "thread_local",
        """
        import threading
        LOCAL = threading.local()
        LOCAL.rate = «2.0¦3.0»
        def step(x): return x * LOCAL.rate
        """,
        "rate",
    ),
    Kind(
        "weak_reference",
        """
        import weakref
        class Box: pass
        box = Box(); box.rate = «2.0¦3.0»
        R = weakref.ref(box)
        def step(x): return x * R().rate
        """,
        "rate",
    ),
    Kind(
        "weak_proxy",
        """
        import weakref
        class Box: pass
        box = Box(); box.rate = «2.0¦3.0»
        R = weakref.proxy(box)
        def step(x): return x * R.rate
        """,
        "R",
        vouched=False,
    ),
    Kind(
        "item_getter",
        'import operator\nGET = operator.itemgetter("«a¦b»")\n'
        'RATES = {"a": 2.0, "b": 3.0}\ndef step(x): return x * GET(RATES)',
        "GET",
    ),
    Kind(
        "program_arguments",
        "import sys\nsys.argv[1:] = ['«2.0¦3.0»']\ndef step(x): return x * float(sys.argv[1])",
        "sys.argv",
    ),
]

OBJECTS = [
    Kind(
        "attribute",
        """
        class Config:
            def __init__(self, rate): self.rate = rate
        config = Config(«2.0¦3.0»)
        def step(x): return x * config.rate
        """,
        "config.rate",
    ),
    Kind(
        "constructor_by_name",
        """
        class Config:
            def __init__(self): self.rate = «2.0¦3.0»
        def step(x): return x * Config().rate
        """,
        "Config.__init__",
    ),
    Kind(
        "constructor_by_type",
        """
        class Config:
            def __init__(self, rate=«2.0¦3.0»): self.rate = rate
            def fresh(self): return type(self)()
        config = Config(4.0)
        def step(x): return x * config.fresh().rate
        """,
        "Config.__init__",
    ),
    *(
        Kind(
            f"constructor_by_type_{name}",
            f"""
            import builtins
            MAKE = type
            class Config:
                kind = type
                def __init__(self, rate=«2.0¦3.0»): self.rate, self.type = rate, "a"
                def fresh(self, make=type, of=builtins): return {made}
            config = Config(4.0)
            def step(x): return x * config.fresh().rate
            """,
            "Config.__init__",
        )
        for name, made in (
            ("of_a_module", "builtins.type(self)()"),
            ("of_a_module_as_a_value", "of.type(self)()"),
            ("asked_for", "getattr(builtins, 'type')(self)()"),
            ("by_another_name", "MAKE(self)()"),
            ("as_a_default", "make(self)()"),
            ("as_an_attribute", "Config.kind(self)()"),
        )
    ),
    Kind(
        "constructor_by_class_method",
        """
        class Config:
            def __init__(self): self.rate = «2.0¦3.0»
            @classmethod
            def fresh(cls): return cls()
        config = Config.__new__(Config)
        def step(x): return x * config.fresh().rate
        """,
        "Config.__init__",
    ),
    Kind(
        "constructor_by_class_method_of_a_base",  # Which the class's own one calls for its class.
        """
        class Base:
            @classmethod
            def fresh(cls): return cls()
        class Config(Base):
            def __init__(self): self.rate = «2.0¦3.0»
            @classmethod
            def fresh(cls): return super().fresh()
        config = Config.__new__(Config)
        def step(x): return x * config.fresh().rate
        """,
        "Config.__init__",
    ),
    Kind(
        "constructor_by_an_inherited_class_method",
        """
        class Base:
            @classmethod
            def fresh(cls): return [cls][0]()
        class Config(Base):
            def __init__(self): self.rate = «2.0¦3.0»
        config = Config.__new__(Config)
        def step(x): return x * config.fresh().rate
        """,
        "Config.__init__",
    ),
    Kind(
        "new_of_a_class",
        """
        class Config:
            def __new__(cls):
                self = object.__new__(cls)
                self.rate = «2.0¦3.0»
                return self
            def other(self): return self.__new__(Config)
        config = Config()
        def step(x): return x * config.other().rate
        """,
        "Config.__new__",
    ),
    Kind(
        "copy_of_a_jitted_function",
        """
        import copy
        def inner(x, n): return x * n * «2.0¦3.0»
        copied = copy.deepcopy(jax.jit(inner, static_argnums=1))
        def step(x): return copied(x, 1)
        """,
        "inner",
    ),
    Kind(
        "options_of_a_copy_of_a_jitted_function",
        """
        import copy
        def inner(x, n): return x * n * (2.0 if type(n) is int else 3.0)
        copied = copy.deepcopy(jax.jit(inner, static_argnums=«1¦()»))
        def step(x): return copied(x, 1)
        """,
        "static_argn",
    ),
    Kind(
        "constructor_of_a_base",
        """
        class Base:
            def __init__(self): self.rate = «2.0¦3.0»
        class Config(Base):
            def make(self): return Config().rate
        config = Config.__new__(Config)
        def step(x): return x * config.make()
        """,
        "Base.__init__",
    ),
    *(
        Kind(
            f"constructor_by_super_{name}",
            f"""
            class Base:
                def __init__(self, rate="«2.0¦3.0»"): self.rate = rate
            class Config(Base):
                def __init__(self, rate="4.0"): self.rate = rate
                {method}
            config = Config()
            def step(x): return x * float({made}.rate)
            """,
            "Base.__init__",
        )
        for name, method, made in (
            ("in_one", "def __init__(self): super().__init__()", "Config()"),
            (
                "in_one_of_a_given_class",
                "def __init__(self): super(Config, self).__init__()",
                "Config()",
            ),
            (
                "in_one_that_keeps_it",
                "def __init__(self): base = super().__init__; base()",
                "Config()",
            ),
            (
                "in_one_beside_another",
                "def __init__(self): super().__init__(5.0); Base.__init__(self)",
                "Config()",
            ),
            (
                "in_one_by_another_name",
                "def reset(self): super().__init__(); return self\n                again = reset",
                "config.again()",
            ),
            ("in_a_method", "def fresh(self): super().__init__(); return self", "config.fresh()"),
        )
    ),
    Kind(
        "constructor_of_a_sibling_by_super",
        """
        class Base:
            def __init__(self): self.rate = 4.0
        class Left(Base):
            def __init__(self): super().__init__()
        class Right(Base):
            def __init__(self): self.rate = «2.0¦3.0»
        class Config(Left, Right): pass
        def step(x): return x * Config().rate
        """,
        "Right.__init__",
    ),
    Kind(
        "constructor_by_super_of_another_object",
        """
        class Base:
            def __init__(self): self.rate = "«2.0¦3.0»"
        class Held(Base):
            def __init__(self): self.rate = "5.0"
        class Maker:
            def __init__(self): super(Held, held).__init__()
        held = Held()
        def step(x):
            Maker()
            return x * float(held.rate)
        """,
        "Base.__init__",
    ),
    Kind(
        "attribute_of_the_generic_type_of_a_field",
        """
        import dataclasses, typing
        class Box(typing.Generic[typing.TypeVar("T")]): rate = «2.0¦3.0»
        @dataclasses.dataclass
        class Net: box: Box[int] | None
        def step(x): return x * dataclasses.fields(Net)[0].type.__args__[0].__origin__.rate
        """,
        "Box.rate",
    ),
    Kind(
        "constructor_that_is_called_by_another_name",
        """
        class Base:
            def __init__(self): self.rate = "«2.0¦3.0»"
        class Config(Base):
            def __init__(self): super().__init__()
            again = __init__
        config = Config()
        config.rate = "5.0"
        def step(x):
            config.again()
            return x * float(config.rate)
        """,
        "Base.__init__",
    ),
    *(
        Kind(
            f"{what}_of_the_type_of_a_field{name}",
            f"""
            import dataclasses, typing
            class Config:
                rate = «2.0¦3.0»
                def __init__(self): self.made = «2.0¦3.0»
            @dataclasses.dataclass
            class Net:
                config: {annotation}
            TYPE = dataclasses.fields(Net)[0].type
            def step(x): return x * {found}{read}
            """,
            "Config.",
        )
        for what, read in (("constructor", "().made"), ("attribute", ".rate"))
        for name, annotation, found in (
            ("", "Config", "dataclasses.fields(Net)[0].type"),
            ("_optional", "typing.Optional[Config]", "typing.get_args(TYPE)[0]"),
            ("_or_none", "Config | None", "dataclasses.fields(Net)[0].type.__args__[0]"),
        )
    ),
    *(
        Kind(
            f"what_a_generated_method_compares_in_{name}",
            f"""
            import dataclasses, equinox as eqx, flax.linen as nn, flax.struct as struct
            @dataclasses.dataclass(frozen=True)
            class Config: rate: float
            {base}
                config: Config
            first, second = Net(Config(2.0)), Net(Config(«2.0¦3.0»))
            def step(x): return x * (2 if first == second else 3)
            """,
            "second.config.rate",
        )
        for name, base in (
            ("linen", "class Net(nn.Module):"),
            ("equinox", "class Net(eqx.Module):"),
            ("struct", "@struct.dataclass\n            class Net:"),
        )
    ),
    *(
        Kind(
            f"constructor_of_a_class_that_is_tested_and_{name}",
            f"""
            class Config:
                def __init__(self): self.rate = «2.0¦3.0»
            class Other: rate = 5.0
            OTHER = Other()
            {more}
            def step(x): return x * {rate}
            """,
            "Config.__init__",
        )
        for name, more, rate in (
            ("made", "", "(OTHER if isinstance(OTHER, Config) else Config()).rate"),
            ("made_before", "", "(Config().rate if not isinstance(OTHER, Config) else 1)"),
            (
                "made_elsewhere",
                "def make(): return Config()",
                "(isinstance(OTHER, Config) or make().rate)",
            ),
            ("named", "KIND = Config", "(isinstance(OTHER, Config) or KIND().rate)"),
            (
                "in_a_tuple",
                "",
                "(isinstance(OTHER, Config) or [each() for each in (Config,)][0].rate)",
            ),
            (
                "given",
                "def make(kind): return kind()",
                "(isinstance(make(Config), Other) or make(Config).rate)",
            ),
            (
                "compared_by_its_owner",
                "Other.__eq__ = lambda self, other: other().rate == 2.0",
                "(2.0 if OTHER == Config else 1.0)",
            ),
            (
                "tested_by_another_function",
                "def isinstance(it, kind): return kind().rate",
                "isinstance(OTHER, Config)",
            ),
        )
    ),
    *(
        Kind(
            f"what_a_{name}_makes_of_a_class_that_is_tested",
            f"""
            import abc
            class Meta(type):
                def __instancecheck__(cls, it): return cls().rate == it.rate
            class Hooked(abc.ABC):
                @classmethod
                def __subclasshook__(cls, kind): return cls().rate == kind.rate
            class Config({bases}):
                def __init__(self): self.rate = «2.0¦3.0»
            class Other: rate = 2.0
            OTHER = Other()
            def step(x): return x * (2 if isinstance(OTHER, Config) else 3)
            """,
            "Config.__init__",
        )
        for name, bases in (("metaclass", "metaclass=Meta"), ("subclass_hook", "Hooked"))
    ),
    Kind(
        "base_of_a_class_that_is_tested",
        """
        class First: pass
        class Second: pass
        class Config(«First¦Second»): pass
        CONFIG = Config()
        def step(x): return x * (2 if isinstance(CONFIG, First) else 3)
        """,
        "Config",
    ),
    Kind(
        "constructor_of_a_held_class",
        """
        class Config:
            def __init__(self): self.rate = «2.0¦3.0»
        class Maker:
            def __init__(self): self.first, self.kind = Config(), Config
        maker = Maker()
        maker.first.rate = 5.0
        def step(x): return x * maker.first.rate * maker.kind().rate
        """,
        "Config.__init__",
    ),
    Kind(
        "attribute_via_function",
        """
        class Config:
            def __init__(self, rate): self.rate = rate
        config = Config(«2.0¦3.0»)
        def rate_of(each): return each.rate
        def step(x): return x * rate_of(config)
        """,
        "config.rate",
    ),
    Kind(
        "data_class_field",
        """
        import dataclasses
        @dataclasses.dataclass
        class Config:
            rate: float = 1.0
        config = Config(«2.0¦3.0»)
        def step(x): return x * config.rate
        """,
        "config.rate",
    ),
    Kind(
        "frozen_data_class_default",
        """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Config:
            rate: float = «2.0¦3.0»
        def step(x): return x * Config().rate
        """,
        "rate",
    ),
    Kind(
        "data_class_field_order",
        """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Config:
            «a: float = 2.0; b: float = 3.0¦b: float = 3.0; a: float = 2.0»
        config = Config()
        def step(x): return x * dataclasses.astuple(config)[0]
        """,
        "Config",
    ),
    Kind(
        "class_attribute",
        "class C:\n    rate = «2.0¦3.0»\ndef step(x): return x * C.rate",
        "C.rate",
    ),
    Kind(
        "inherited_class_attribute",
        """
        class Base:
            rate = «2.0¦3.0»
        class C(Base): pass
        def step(x): return x * C().rate
        """,
        "Base.rate",
    ),
    Kind(
        "base_class",
        """
        class One:
            rate = 2.0
        class Two:
            rate = 3.0
        class C(«One, Two¦Two, One»): pass
        def step(x): return x * C.rate
        """,
        "C",
    ),
    Kind(
        "method",
        """
        class Model:
            def scale(self, x): return x * «2¦3»
        model = Model()
        def step(x): return model.scale(x)
        """,
        "Model.scale",
    ),
    Kind(
        "method_override",
        """
        class Base:
            def scale(self, x): return x * 2
        class Model(Base):
            «pass¦def scale(self, x): return x * 3»
        model = Model()
        def step(x): return model.scale(x)
        """,
        "scale",
    ),
    Kind(
        "super_method",
        """
        class Base:
            def scale(self, x): return x * «2¦3»
        class Model(Base):
            def scale(self, x): return super().scale(x) + 1
        model = Model()
        def step(x): return model.scale(x)
        """,
        "Base.scale",
    ),
    *(
        Kind(
            f"constructor_by_the_class_of_a_method_{number}",
            f"""
            class Base:
                def scale(self, x): return x
            class Model(Base):
                def __init__(self): self.rate = «2.0¦3.0»
                def scale(self, x):
                    other = {make}
                    return super().scale(x) * other.rate
            model = Model.__new__(Model)
            def step(x): return model.scale(x)
            """,
            "Model.__init__",
        )
        for number, make in enumerate(
            (
                "__class__()",
                "[each() for each in (Model, self)[:1]][0]",
                "super().__thisclass__()",
                "super().__self_class__()",
                "(lambda: __class__)()()",
                "[__class__() for _ in range(1)][0]",
                "super(__class__, self) and __class__()",
            )
        )
    ),
    *(
        Kind(
            f"part_of_a_class_{number}",
            f"""
            class Base:
                rate = {rate}
                def __init__(self): self.rate = {own}
                def scale(self, x): return x * {method}
                @staticmethod
                def fresh(): return Base()
                def again(self): return type(self)()
            class Model(Base):
                def scale(self, x): return {call}
            model = Model.__new__(Model)
            def step(x): return model.scale(x)
            """,
            named,
        )
        for number, (rate, own, method, call, named) in enumerate(
            (
                ("«2.0¦3.0»", 1, 1, "x * Base.rate", "Base.rate"),
                ("«2.0¦3.0»", 1, 1, "x * Model.rate", "Base.rate"),
                (1, 1, "«2.0¦3.0»", "Base.scale(self, x)", "Base.scale"),
                (1, "«2.0¦3.0»", 1, "x * Base.fresh().rate", "Base.__init__"),
                (1, "«2.0¦3.0»", 1, "x * Base.again(self).rate", "Base.__init__"),
                (1, "«2.0¦3.0»", 1, "x * Base.again.__get__(self)().rate", "Base.__init__"),
            )
        )
    ),
    *(
        Kind(
            f"constructor_by_a_replaced_super_{number}",
            f"""
            def super(cls, instance): return cls()
            class Model:
                def __init__(self): self.rate = «2.0¦3.0»
                def scale(self, x): return x * super({cls}, self).rate
            model = Model.__new__(Model)
            def step(x): return model.scale(x)
            """,
            "Model.__init__",
        )
        for number, cls in enumerate(("Model", "__class__"))
    ),
    Kind(
        "method_monkeypatched",
        """
        class Model:
            def scale(self, x): return x * 2
        def mine(self, x): return x * 3
        if «0¦1»: Model.scale = mine
        model = Model()
        def step(x): return model.scale(x)
        """,
        "scale",
    ),
    Kind(
        "method_on_the_instance",
        """
        class Model:
            def scale(self, x): return x * 2
        model = Model()
        if «0¦1»: model.scale = lambda x: x * 3
        def step(x): return model.scale(x)
        """,
        "scale",
    ),
    Kind(
        "bound_method_step",
        """
        class Model:
            def __init__(self, rate): self.rate = rate
            def apply(self, x): return x * self.rate
        step = Model(«2.0¦3.0»).apply
        """,
        "rate",
    ),
    Kind(
        "property",
        """
        class Model:
            @property
            def rate(self): return «2.0¦3.0»
        model = Model()
        def step(x): return x * model.rate
        """,
        "Model.rate",
    ),
    Kind(
        "cached_property",
        """
        import functools
        class Model:
            @functools.cached_property
            def rate(self): return «2.0¦3.0»
        model = Model()
        def step(x): return x * model.rate
        """,
        "Model.rate",
    ),
    Kind(
        "static_method",
        """
        class Model:
            @staticmethod
            def scale(x): return x * «2¦3»
        def step(x): return Model.scale(x)
        """,
        "Model.scale",
    ),
    Kind(
        "class_method",
        """
        class Model:
            rate = «2.0¦3.0»
            @classmethod
            def scale(cls, x): return x * cls.rate
        def step(x): return Model.scale(x)
        """,
        "Model.rate",
    ),
    Kind(
        "callable_object",
        """
        class Model:
            def __init__(self, rate): self.rate = rate
            def __call__(self, x): return x * self.rate
        model = Model(«2.0¦3.0»)
        def step(x): return model(x)
        """,
        "rate",
    ),
    Kind(
        "callable_object_code",
        """
        class Model:
            def __call__(self, x): return x * «2¦3»
        model = Model()
        def step(x): return model(x)
        """,
        "__call__",
    ),
    Kind(
        "callable_object_step",
        """
        class Model:
            def __call__(self, x): return x * «2¦3»
        step = Model()
        """,
        "__call__",
    ),
    *(
        Kind(
            f"what_defines_a_class_in_the_step_by_{name}",
            f"""
            class Meta(type):
                def __new__(meta, *given):
                    cls = super().__new__(meta, *given)
                    cls.rate = {values[0]}
                    return cls
                def __init__(cls, *given): cls.rate *= {values[1]}
            class Base:
                def __init_subclass__(cls, **given): cls.rate = {values[2]}
            class Field:
                def __set_name__(self, owner, name): owner.scale = {values[3]}
            def step(x):
                class First(metaclass=Meta): pass
                class Second(Base): field = Field()
                return x * First.rate * Second.rate * Second.scale
            """,
            where,
        )
        for name, where, *values in (
            ("new", "Meta.__new__", "«2¦3»", 5, 7, 11),
            ("init", "Meta.__init__", 2, "«5¦3»", 7, 11),
            ("init_subclass", "Base.__init_subclass__", 2, 5, "«7¦3»", 11),
            ("set_name", "Field.__set_name__", 2, 5, 7, "«11¦3»"),
        )
    ),
    Kind(
        "array_that_is_read_only",
        """
        WEIGHTS = np.arange(3.0)
        WEIGHTS.setflags(write=«True¦False»)
        def step(x): return x * (2 if WEIGHTS.flags.writeable else 3)
        """,
        "WEIGHTS.flags",
    ),
    Kind(
        "array_that_is_a_view",
        """
        WEIGHTS = «np.arange(3.0)¦np.arange(6.0)[:3]»
        def step(x): return x * (2 if WEIGHTS.base is None else 3)
        """,
        "WEIGHTS.base",
    ),
    Kind(
        "metaclass_attribute",
        """
        class Meta(type):
            rate = «2.0¦3.0»
        class C(metaclass=Meta): pass
        def step(x): return x * C.rate
        """,
        "Meta.rate",
    ),
    Kind(
        "descriptor",
        """
        class Rate:
            def __get__(self, instance, owner): return «2.0¦3.0»
        class C:
            rate = Rate()
        config = C()
        def step(x): return x * config.rate
        """,
        "__get__",
    ),
    Kind(
        "getattr_method",
        """
        class C:
            def __init__(self): self._data = {"rate": «2.0¦3.0»}
            def __getattr__(self, name): return self._data[name]
        config = C()
        def step(x): return x * config.rate
        """,
        "rate",
    ),
    Kind(
        "getattr_gives_anything",
        """
        class C:
            def __init__(self): self.hidden = «2.0¦3.0»
            def __getattr__(self, name):
                if name.startswith("__"): raise AttributeError(name)
                return self
        config = C()
        def step(x): return x * config.anything.hidden
        """,
        "hidden",
    ),
    Kind(
        "getattribute_method",
        """
        class C:
            def __getattribute__(self, name): return «2.0¦3.0»
        config = C()
        def step(x): return x * config.rate
        """,
        "__getattribute__",
    ),
    Kind(
        "slots",
        """
        class C:
            __slots__ = ("rate",)
            def __init__(self, rate): self.rate = rate
        config = C(«2.0¦3.0»)
        def step(x): return x * config.rate
        """,
        "config.rate",
    ),
    Kind(
        "named_tuple_default",
        """
        from typing import NamedTuple
        class C(NamedTuple):
            rate: float = «2.0¦3.0»
        def step(x): return x * C().rate
        """,
        "rate",
    ),
    Kind(
        "named_tuple_field_order",
        """
        import collections
        C = collections.namedtuple("C", "«a b¦b a»")
        def step(x): return x * C(2.0, 3.0).a
        """,
        "C",
    ),
    Kind(
        "cache_info_of_the_user",
        """
        class Memo:
            def __init__(self, rate): self.rate = rate
            def cache_info(self): return None
            def __call__(self, x): return x * self.rate
        memo = Memo(«2.0¦3.0»)
        def step(x): return memo(x)
        """,
        "rate",
    ),
    Kind(
        "getattr_computed",
        """
        class C: pass
        config = C(); config.rate = «2.0¦3.0»
        NAME = "ra"
        def step(x): return x * getattr(config, NAME + "te")
        """,
        "config.rate",
    ),
    Kind(
        "getattr_alias",
        """
        class C: pass
        config = C(); config.rate = «2.0¦3.0»
        read, NAME = getattr, "ra"
        def step(x): return x * read(config, NAME + "te")
        """,
        "config.rate",
    ),
    Kind(
        "attribute_getter",
        """
        from operator import attrgetter as ag
        class C: pass
        config = C(); config.rate = «2.0¦3.0»
        get = ag("rate")
        def step(x): return x * get(config)
        """,
        "config.rate",
    ),
    Kind(
        "attribute_getter_inside",
        """
        from operator import attrgetter as ag
        class C: pass
        config = C(); config.rate = «2.0¦3.0»
        def step(x): return x * ag("".join(["ra", "te"]))(config)
        """,
        "config.rate",
    ),
    Kind(
        "method_caller",
        """
        import operator
        class C:
            def scale(self, x): return x * «2¦3»
        config, call = C(), operator.methodcaller
        def step(x): return call("sca" + "le"[:2], x)(config)
        """,
        "C.scale",
    ),
    Kind(
        "vars_of_object",
        """
        class C: pass
        config = C(); config.rate = «2.0¦3.0»
        def step(x): return x * list(vars(config).values())[0]
        """,
        "config.rate",
    ),
    Kind(
        "vars_order",
        """
        class C: pass
        config = C()
        for name, value in («("a", 2.0), ("b", 3.0)¦("b", 3.0), ("a", 2.0)»):
            setattr(config, name, value)
        def step(x): return x * list(vars(config).values())[0]
        """,
        "config",
    ),
    Kind(
        "dict_of_object",
        """
        class C: pass
        config = C(); config.rate = «2.0¦3.0»
        def step(x): return x * config.__dict__["ra" + str("te")]
        """,
        "config.rate",
    ),
    Kind(
        "dict_of_module",
        """
        import dict_of_module_other as other
        def step(x): return x * other.__dict__["RA" + str("TE")]
        # --- dict_of_module_other.py
        RATE = «2.0¦3.0»
        """,
        "RATE",
    ),
    Kind(
        "globals_access",
        'RATE = «2.0¦3.0»\ndef step(x): return x * globals()["RA" + str("TE")]',
        "RATE",
    ),
    Kind(
        "sys_modules",
        """
        import sys, sys_modules_other
        def step(x): return x * sys.modules["sys_modules" + "_other"].RATE
        # --- sys_modules_other.py
        RATE = «2.0¦3.0»
        """,
        "sys.modules",
        vouched=False,
    ),
    Kind(
        "globals_of_a_function",
        """
        import globals_of_other
        def step(x): return x * globals_of_other.function.__globals__["RATE"]
        # --- globals_of_other.py
        RATE = «2.0¦3.0»
        def function(): pass
        """,
        "__globals__",
        vouched=False,
    ),
    Kind(
        "format_string",
        """
        class C: pass
        config = C(); config.rate = «2.0¦3.0»
        def step(x): return x * float("{0.rate}".format(config))
        """,
        "config.rate",
    ),
    Kind(
        "subclasses",
        """
        class Base: pass
        class One(Base): rate = «2.0¦3.0»
        def step(x): return x * Base.__subclasses__()[0].rate
        """,
        "__subclasses__",
        vouched=False,
    ),
    Kind(
        "position_in_a_file",
        """
        from pathlib import Path
        HERE = Path(__file__).parent
        (HERE / "position.txt").write_text("«ab¦abc»")
        LOG = open(HERE / "position.txt", "a")
        def step(x): return x * LOG.tell()
        """,
        "LOG.tell()",
    ),
    Kind(
        "memory_of_a_device",
        """
        def step(x):
            stats = jax.devices()[0].memory_stats() or {}
            return x * «2.0¦3.0» + 0 * stats.get("bytes_in_use", 0)
        """,
        "memory_stats",
        vouched=False,
    ),
    Kind(
        "replaced_data_class",
        """
        import dataclasses
        @dataclasses.dataclass
        class C:
            a: float
            b: float = 1.0
        config = C(«2.0¦3.0»)
        def step(x): return x * dataclasses.replace(config, b=2.0).a
        """,
        "config.a",
    ),
    Kind(
        "state_through_copy",
        """
        import copy
        class C: pass
        config = C(); config.rate = «2.0¦3.0»
        def step(x): return x * copy.copy(config).rate
        """,
        "config.rate",
    ),
    Kind(
        "jax_array_protocol",
        """
        class C:
            def __init__(self, rate): self.inner = rate
            def __jax_array__(self): return jnp.asarray(self.inner)
        config = C(«2.0¦3.0»)
        def step(x): return x * jnp.asarray(config)
        """,
        "inner",
    ),
    Kind(
        "numpy_array_protocol",
        """
        class C:
            def __array__(self, dtype=None, copy=None): return np.asarray(«2.0¦3.0»)
        config = C()
        def step(x): return x * np.asarray(config)
        """,
        "__array__",
    ),
    Kind(
        "operator_overload",
        """
        class C:
            def __rmul__(self, x): return jnp.asarray(x) * «2¦3»
            def times(self, x): return self.__rmul__(x)
        config = C()
        def step(x): return config.times(x)
        """,
        "__rmul__",
    ),
    Kind(
        "abstract_base_registration",
        """
        import abc
        class Base(abc.ABC): pass
        class One: pass
        if «0¦1»: Base.register(One)
        one = One()
        def step(x): return x * (3 if isinstance(one, Base) else 2)
        """,
        "Base",
    ),
]

OUTSIDE = [
    Kind(
        "file_open",
        """
        PLACE = "file_open_data.txt"
        import os, sys
        def step(x):
            with open(os.path.join(sys.path[0], PLACE)) as file: return x * float(file.read())
        # --- file_open_data.txt
        «2.0¦3.0»
        """,
        "file_open_data.txt",
    ),
    Kind(
        "file_read_text",
        """
        def step(x): return x * float((Path(__file__).parent / "data.txt").read_text())
        # --- data.txt
        «2.0¦3.0»
        """,
        "data.txt",
    ),
    Kind(
        "file_json",
        """
        import json
        HERE = Path(__file__).parent
        def step(x):
            with (HERE / "data.json").open() as file: return x * json.load(file)["rate"]
        # --- data.json
        {"rate": «2.0¦3.0»}
        """,
        "data.json",
    ),
    Kind(
        "file_opened_by_partial",
        """
        import functools
        READ = functools.partial(open, Path(__file__).parent / "data.txt")
        def step(x):
            with READ() as file: return x * float(file.read())
        # --- data.txt
        «2.0¦3.0»
        """,
        "data.txt",
    ),
    Kind(
        "file_opened_by_a_library",
        """
        import io
        FILES = {"rate": Path(__file__).parent / "data.txt"}
        READERS = {"text": io.open}
        def step(x):
            (file,) = jax.tree.leaves(jax.tree.map(READERS["text"], FILES))
            with file: return x * float(file.read())
        # --- data.txt
        «2.0¦3.0»
        """,
        "data.txt",
    ),
    Kind(
        "file_opened_by_a_class",
        """
        import functools, io
        READ = functools.partial(io.FileIO, Path(__file__).parent / "data.txt")
        def step(x):
            with READ() as file: return x * float(file.read())
        # --- data.txt
        «2.0¦3.0»
        """,
        "data.txt",
    ),
    Kind(
        "file_numpy",
        """
        HERE = Path(__file__).parent
        np.save(HERE / "data.npy", np.array(«2.0¦3.0»))
        def step(x): return x * np.load(HERE / "data.npy")
        """,
        "data.npy",
    ),
    Kind(
        "file_memory_mapped",
        """
        HERE = Path(__file__).parent
        np.save(HERE / "data.npy", np.array([«2.0¦3.0»]))
        def step(x): return x * np.asarray(np.load(HERE / "data.npy", mmap_mode="r"))
        """,
        "stat",
        vouched=False,
    ),
    Kind(
        "file_loaded_text",
        """
        HERE = Path(__file__).parent
        def step(x): return x * np.loadtxt(HERE / "data.csv", delimiter=",").sum()
        # --- data.csv
        1.0,«2.0¦3.0»
        """,
        "stat",
        vouched=False,
    ),
    Kind(
        "file_low_level",
        """
        import os
        HERE = str(Path(__file__).parent)
        def step(x):
            number = os.open(HERE + "/data.txt", os.O_RDONLY)
            try: return x * float(os.read(number, 10))
            finally: os.close(number)
        # --- data.txt
        «2.0¦3.0»
        """,
        "os.open",
        vouched=False,
    ),
    Kind(
        "file_of_a_package",
        """
        import pkgutil, importlib.resources, file_of_pkg
        def step(x): return x * float(pkgutil.get_data("file_of_pkg", "data.txt"))
        # --- file_of_pkg/__init__.py
        # --- file_of_pkg/data.txt
        «2.0¦3.0»
        """,
        "data.txt",
    ),
    Kind(
        "file_of_a_package_resource",
        """
        import importlib.resources, resource_pkg
        def step(x):
            return x * float(importlib.resources.files(resource_pkg).joinpath("d.txt").read_text())
        # --- resource_pkg/__init__.py
        # --- resource_pkg/d.txt
        «2.0¦3.0»
        """,
        "d.txt",
    ),
    Kind(
        "file_that_appears",
        """
        HERE = Path(__file__).parent
        «¦(HERE / "data.txt").write_text("3.0")»
        def step(x):
            try: return x * float((HERE / "data.txt").read_text())
            except FileNotFoundError: return x * 2.0
        """,
        "data.txt",
    ),
    Kind(
        "file_read_by_jitted_helper_before",
        """
        HERE = Path(__file__).parent
        @jax.jit
        def helper(x): return x * float((HERE / "data.txt").read_text())
        helper(np.arange(1, 9, dtype=np.float32))
        def step(x): return helper(x) + 1
        # --- data.txt
        «2.0¦3.0»
        """,
        "data.txt",
    ),
    Kind(
        "file_read_by_cached_helper_before",
        """
        import functools
        HERE = Path(__file__).parent
        @functools.lru_cache
        def rate(): return float((HERE / "data.txt").read_text())
        rate()
        def step(x): return x * rate()
        # --- data.txt
        «2.0¦3.0»
        """,
        "earlier calls",
        vouched=False,
    ),
    Kind(
        "file_read_by_cached_helper",
        """
        import functools
        HERE = Path(__file__).parent
        @functools.lru_cache
        def rate(): return float((HERE / "data.txt").read_text())
        def step(x): return x * rate()
        # --- data.txt
        «2.0¦3.0»
        """,
        "data.txt",
    ),
    Kind(
        "file_in_a_thread",
        """
        from concurrent.futures import ThreadPoolExecutor
        HERE = Path(__file__).parent
        def rate(): return float((HERE / "data.txt").read_text())
        def step(x):
            with ThreadPoolExecutor(1) as pool: return x * pool.submit(rate).result()
        # --- data.txt
        «2.0¦3.0»
        """,
        "thread",
        vouched=False,
    ),
    Kind(
        "file_found_in_a_directory",
        """
        HERE = Path(__file__).parent / "data"
        def step(x): return x * len(list(HERE.iterdir()))
        # --- data/a.txt
        # --- data/«a.txt¦b.txt»
        """,
        "list",
        vouched=False,
    ),
    Kind(
        "file_existence",
        """
        HERE = Path(__file__).parent
        def step(x): return x * (3 if (HERE / "«b.txt¦a.txt»").exists() else 2)
        # --- a.txt
        """,
        "",
        vouched=False,
    ),
    Kind(
        "standard_input",
        """
        import io, sys
        sys.stdin = io.StringIO("«2.0¦3.0»")
        def step(x):
            sys.stdin.seek(0)
            return x * float(sys.stdin.readline())
        """,
        "stdin",
        vouched=False,
    ),
    Kind(
        "environment_item",
        """
        import os
        os.environ["SC_RATE_1"] = "«2.0¦3.0»"
        def step(x): return x * float(os.environ["SC_RATE_1"])
        """,
        "SC_RATE_1",
    ),
    Kind(
        "environment_getenv",
        """
        import os
        os.environ["SC_RATE_2"] = "«2.0¦3.0»"
        def step(x): return x * float(os.getenv("SC_RATE_2", "1"))
        """,
        "SC_RATE_2",
    ),
    Kind(
        "environment_default",
        """
        import os
        if «0¦1»: os.environ["SC_RATE_3"] = "3.0"
        def step(x): return x * float(os.environ.get("SC_RATE_3", "2.0"))
        """,
        "SC_RATE_3",
    ),
    Kind(
        "environment_contains",
        """
        import os
        if «0¦1»: os.environ["SC_RATE_4"] = "3.0"
        def step(x): return x * (3 if "SC_RATE_4" in os.environ else 2)
        """,
        "SC_RATE_4",
    ),
    Kind(
        "environment_bytes",
        """
        import os
        os.environ["SC_RATE_5"] = "«2.0¦3.0»"
        def step(x): return x * float(os.environb[b"SC_RATE_5"])
        """,
        "SC_RATE_5",
    ),
    Kind(
        "environment_alias",
        """
        from os import environ as E
        E["SC_RATE_6"] = "«2.0¦3.0»"
        def step(x): return x * float(E["SC_RATE_6"])
        """,
        "SC_RATE_6",
    ),
    Kind(
        "environment_by_jitted_helper_before",
        """
        import os
        os.environ["SC_RATE_7"] = "«2.0¦3.0»"
        @jax.jit
        def helper(x): return x * float(os.environ["SC_RATE_7"])
        helper(np.arange(1, 9, dtype=np.float32))
        def step(x): return helper(x) + 1
        """,
        "SC_RATE_7",
    ),
    Kind(
        "clock",
        "import time\ndef step(x): return x * «2¦3» + 0 * time.time()",
        "time.time",
        vouched=False,
    ),
    Kind(
        "clock_by_name",
        "from time import perf_counter as now\ndef step(x): return x * «2¦3» + 0 * now()",
        "perf_counter",
        vouched=False,
    ),
    Kind(
        "date_today",
        "import datetime\ndef step(x): return x * «2¦3» + 0 * datetime.datetime.now().year",
        "now",
        vouched=False,
    ),
    Kind(
        "date_alias",
        "import datetime\nd = datetime.datetime\nnow = getattr(d, 'now')\n"
        "def step(x): return x * «2¦3» + 0 * now().year",
        "now",
        vouched=False,
    ),
    Kind(
        "date_of_a_subclass",
        "import datetime\nclass Stamp(datetime.datetime): pass\n"
        "def step(x): return x * «2¦3» + 0 * Stamp.now().year",
        "now",
        vouched=False,
    ),
    Kind(
        "date_of_numpy",
        "import numpy as np\ndef step(x): return x * «2¦3» + 0 * np.datetime64('now').astype(int)",
        "now",
        vouched=False,
    ),
    Kind(
        "random_global",
        "import random\ndef step(x): return x * «2¦3» + 0 * random.random()",
        "random",
        vouched=False,
    ),
    Kind(
        "random_by_name",
        "from random import uniform\ndef step(x): return x * «2¦3» + 0 * uniform(1, 2)",
        "uniform",
        vouched=False,
    ),
    Kind(
        "random_uuid",
        "import uuid\ndef step(x): return x * «2¦3» + 0 * (uuid.uuid4().int % 7)",
        "uuid",
        vouched=False,
    ),
    Kind(
        "random_secrets",
        "import secrets\ndef step(x): return x * «2¦3» + 0 * secrets.randbelow(7)",
        "secrets",
        vouched=False,
    ),
    Kind(
        "random_urandom",
        "import os\ndef step(x): return x * «2¦3» + 0 * os.urandom(1)[0]",
        "urandom",
        vouched=False,
    ),
    Kind(
        "random_numpy_global",
        "def step(x): return x * «2¦3» + 0 * np.random.rand()",
        "numpy.random",
        vouched=False,
    ),
    Kind(
        "random_numpy_generator",
        "rng = np.random.default_rng(«0¦1»)\ndef step(x): return x * rng.normal()",
        "rng",
        vouched=False,
        unstable=True,
    ),
    Kind(
        "random_numpy_new_generator",
        "def step(x): return x * np.random.default_rng(«0¦1»).normal()",
        "step",
    ),
    Kind(
        "random_numpy_state",
        "rng = np.random.RandomState(«0¦1»)\ndef step(x): return x * rng.rand()",
        "rng",
        vouched=False,
        unstable=True,
    ),
    Kind(
        "random_generator",
        "import random\nrng = random.Random(«0¦1»)\ndef step(x): return x * rng.random()",
        "rng",
        vouched=False,
        unstable=True,
    ),
    Kind(
        "random_generator_that_is_put_back",
        """
        import random
        rng = random.Random(«0¦1»)
        def step(x):
            state = rng.getstate()
            drawn = rng.random()
            rng.setstate(state)
            return x * drawn
        """,
        "rng",
    ),
    Kind(
        "number_that_is_counted_here_and_read_there",
        """
        class Keys: pass
        keys = Keys()
        keys.n = «2¦3»
        def count(): keys.n += 1
        def step(x):
            count()
            keys.n -= 1
            return x * read(keys)
        def read(of): return getattr(of, "n")
        """,
        "keys.n",
    ),
    Kind(
        "process_number",
        "import os\ndef step(x): return x * «2¦3» + 0 * os.getpid()",
        "getpid",
        vouched=False,
    ),
    Kind(
        "object_identity",
        "A = object()\ndef step(x): return x * «2¦3» + 0 * (id(A) % 7)",
        "id",
        vouched=False,
    ),
    Kind(
        "id_in_a_repr",
        """
        class Config:
            def __repr__(self): return "Config" + " " * (id(self) % 7)
        config = Config()
        def step(x): return x * «2¦3» + 0 * len(repr(config))
        """,
        "builtins.id",
        vouched=False,
    ),
    Kind(
        "string_hash", 'def step(x): return x * «2¦3» + 0 * (hash("a") % 7)', "hash", vouched=False
    ),
    Kind(
        "string_hash_alias",
        'h = hash\ndef step(x): return x * «2¦3» + 0 * (h("a") % 7)',
        "hash",
        vouched=False,
    ),
    Kind(
        "another_process",
        "import subprocess\n"
        "def step(x): return x * float(subprocess.check_output(['echo', '«2¦3»']))",
        "subprocess",
        vouched=False,
    ),
    Kind(
        "import_by_name",
        """
        import importlib
        def step(x): return x * importlib.import_module("import_by_name_m").RATE
        # --- import_by_name_m.py
        RATE = «2.0¦3.0»
        """,
        "import_module",
        vouched=False,
    ),
    Kind(
        "import_builtin",
        """
        def step(x): return x * __import__("import_builtin_m").RATE
        # --- import_builtin_m.py
        RATE = «2.0¦3.0»
        """,
        "__import__",
        vouched=False,
    ),
    Kind(
        "run_path",
        """
        import runpy
        HERE = str(Path(__file__).parent)
        def step(x): return x * runpy.run_path(HERE + "/conf.txt")["RATE"]
        # --- conf.txt
        RATE = «2.0¦3.0»
        """,
        "runpy",
        vouched=False,
    ),
    Kind(
        "logging_directory_name",
        """
        from logging_own.train import step
        # --- logging_own/__init__.py
        # --- logging_own/train.py
        HERE = Path(__file__).parent
        def step(x): return x * float((HERE / "data.txt").read_text())
        # --- logging_own/data.txt
        «2.0¦3.0»
        """,
        "data.txt",
    ),
    Kind(
        "frame_inspection",
        """
        import sys
        def scale(x): return x * sys._getframe(1).f_locals["rate"]
        def step(x):
            rate = «2.0¦3.0»
            return scale(x)
        """,
        "_getframe",
        vouched=False,
    ),
]
