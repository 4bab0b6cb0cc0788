"""Changes of what is out of sight: beside a value, in a class, or kept for the whole process."""

from .kinds import Kind

BESIDE_VALUES = [
    Kind(
        "deque_length",
        """
        import collections
        LAST = collections.deque([1.0, 2.0], maxlen=«2¦3»)
        def step(x):
            last = LAST.copy()
            last.append(3.0)
            return x * sum(last)
        """,
        "LAST",
    ),
    Kind(
        "ordered_dict_moved",
        """
        from collections import OrderedDict
        RATES = OrderedDict(a=2.0, b=3.0)
        «¦RATES.move_to_end("a")»
        def step(x): return x * list(RATES.values())[0]
        """,
        "RATES (order)",
    ),
    Kind(
        "set_of_tuples",
        "PAIRS = {(1, 2), (3, «4¦5»)}\ndef step(x): return x * (2 if (3, 4) in PAIRS else 3)",
        "PAIRS",
    ),
    Kind(
        "numpy_memory_order",
        'W = np.array([[1.0, 2.0], [3.0, 4.0]], order="«C¦F»")\n'
        'def step(x): return x * W.ravel("K")[1]',
        "W",
    ),
    Kind(
        "numpy_class",
        'A = np.array(["ab ", "c"])«¦.view(np.char.chararray)»\ndef step(x): return x * len(A[0])',
        "A",
    ),
    Kind(
        "numpy_matrix",
        "A = np.«array¦matrix»([[1.0, 2.0], [3.0, 4.0]])\n"
        "def step(x): return x * float((A * A)[0, 0])",
        "A",
    ),
    Kind(
        "numpy_metadata",
        'D = np.dtype("f4", metadata={"rate": «2.0¦3.0»})\n'
        'def step(x): return x * np.zeros(1, D).dtype.metadata["rate"]',
        "D (metadata)['rate']",
    ),
    Kind(
        "numpy_subclass_attribute",
        """
        class Mine(np.ndarray): rate = «2.0¦3.0»
        A = np.ones(3).view(Mine)
        def step(x): return x * A.rate
        """,
        "Mine.rate",
    ),
    Kind(
        "numpy_subclass_method",
        """
        class Mine(np.ndarray):
            def scale(self): return «2.0¦3.0»
        A = np.ones(3).view(Mine)
        def step(x): return x * A.scale()
        """,
        "Mine.scale",
    ),
    Kind(
        "numpy_scalar_subclass",
        """
        class Mine(np.float64): pass
        A = Mine(1.0)
        A.rate = «2.0¦3.0»
        def step(x): return x * A.rate
        """,
        "A.rate",
    ),
    Kind(
        "random_state_subclass",
        """
        class Mine(np.random.RandomState): rate = «2.0¦3.0»
        R = Mine(0)
        def step(x): return x * R.rate
        """,
        "Mine.rate",
    ),
    Kind(
        "time_zone_of_the_user",
        """
        import datetime
        class Zone(datetime.tzinfo):
            def __init__(self, hours): self.hours = hours
            def utcoffset(self, when): return datetime.timedelta(hours=self.hours)
            def __repr__(self): return "Zone"
        D = datetime.datetime(2020, 1, 1, tzinfo=Zone(«2¦3»))
        def step(x): return x * (D.utcoffset().seconds / 3600)
        """,
        "D.tzinfo",
    ),
    Kind(
        "time_zone_of_a_file",
        """
        import datetime, io, struct, zoneinfo
        head = struct.pack(">4s16x6l", b"TZif", 0, 0, 0, 0, 1, 4)
        content = head + struct.pack(">lbb", «2¦3» * 3600, 0, 0) + b"ABC\\0"
        ZONE = zoneinfo.ZoneInfo.from_file(io.BytesIO(content), key="here")
        def step(x): return x * (ZONE.utcoffset(datetime.datetime(2020, 1, 1)).seconds / 3600)
        """,
        "ZONE",
        vouched=False,
    ),
    Kind(
        "context_variable_without_value",
        """
        import contextvars
        RATE = contextvars.ContextVar("rate")
        «RATE.set(None)¦»
        def step(x):
            try: RATE.get()
            except LookupError: return x * 3
            return x * 2
        """,
        "RATE",
    ),
    Kind(
        "class_in_an_alias",
        """
        class Config: rate = «2.0¦3.0»
        ALIAS = list[Config]
        def step(x): return x * ALIAS.__args__[0].rate
        """,
        "Config.rate",
    ),
    Kind(
        "class_in_a_union",
        """
        from typing import get_args
        class Config: rate = «2.0¦3.0»
        ALIAS = Config | None
        def step(x): return x * get_args(ALIAS)[0].rate
        """,
        "Config.rate",
    ),
    Kind(
        "generic_class_by_an_alias",
        """
        from typing import Generic, TypeVar
        T = TypeVar("T")
        class Box(Generic[T]): rate = «2.0¦3.0»
        Numbers = Box[int]
        def step(x): return x * Numbers().rate
        """,
        "Box.rate",
    ),
    Kind(
        "annotated_type",
        """
        from typing import Annotated
        class Unit:
            def __init__(self, rate): self.rate = rate
            def __repr__(self): return "Unit"
        ALIAS = Annotated[float, Unit(«2.0¦3.0»)]
        def step(x): return x * ALIAS.__metadata__[0].rate
        """,
        "rate",
    ),
    Kind(
        "logger_that_is_disabled",
        """
        import logging
        LOG = logging.getLogger("logger_that_is_disabled")
        LOG.setLevel(logging.INFO)
        LOG.disabled = «False¦True»
        def restore(): LOG.disabled = False; LOG.setLevel(0)
        def step(x): return x * (3 if LOG.isEnabledFor(logging.INFO) else 2)
        """,
        "LOG",
    ),
    Kind(
        "attribute_of_a_jitted_function",
        """
        @jax.jit
        def helper(x): return x
        helper.rate = «2.0¦3.0»
        def step(x): return helper(x) * helper.rate
        """,
        "helper.rate",
    ),
    Kind(
        "attribute_of_a_cached_function",
        """
        import functools
        @functools.cache
        def helper(): return 1.0
        helper.rate = «2.0¦3.0»
        def step(x): return x * helper.rate
        """,
        "helper.rate",
    ),
    Kind(
        "context_variable_default",
        """
        import contextvars
        RATE = contextvars.ContextVar("rate", default=«2.0¦3.0»)
        def step(x): return x * RATE.get()
        """,
        "RATE (default)",
    ),
]

IN_CLASSES = [
    Kind(
        "enum_attribute",
        """
        import enum
        class Rate(enum.Enum):
            LOW = 1, «2.0¦3.0»
            def __new__(cls, value, rate):
                made = object.__new__(cls)
                made._value_, made.rate = value, rate
                return made
        def step(x): return x * Rate.LOW.rate
        """,
        "Rate.LOW.rate",
    ),
    Kind(
        "enum_attribute_set_later",
        """
        import enum
        class Rate(enum.Enum): LOW = 1
        Rate.LOW.rate = «2.0¦3.0»
        CHOSEN = Rate.LOW
        def step(x): return x * CHOSEN.rate
        """,
        "CHOSEN.rate",
    ),
    Kind(
        "enum_alias",
        """
        import enum
        class Rate(enum.Enum):
            LOW = 2.0
            HIGH = 3.0
            USUAL = «2.0¦3.0»
        def step(x): return x * Rate.USUAL.value
        """,
        "Rate.USUAL",
    ),
    Kind(
        "slots_order",
        """
        class Config:
            __slots__ = («"a", "b"¦"b", "a"»)
            def __init__(self): self.a, self.b = 2.0, 3.0
        config = Config()
        def step(x): return x * [getattr(config, name) for name in config.__slots__][0]
        """,
        "__slots__",
    ),
    Kind(
        "generic_base",
        """
        from typing import Generic, TypeVar, get_args
        T = TypeVar("T")
        class Layer(Generic[T]): pass
        class Mine(Layer[np.«float32¦float16»]): pass
        def step(x): return x * get_args(Mine.__orig_bases__[0])[0](2).itemsize
        """,
        "Mine.__orig_bases__",
    ),
    Kind(
        "annotation_in_a_signature",
        """
        import inspect
        def scale(x: «2.0¦3.0»): return x
        def step(x): return x * inspect.signature(scale).parameters["x"].annotation
        """,
        "annotation",
        vouched=False,
    ),
    Kind(
        "property_subclass",
        """
        class lazy(property): pass
        class Config:
            @lazy
            def rate(self): return «2.0¦3.0»
        config = Config()
        def step(x): return x * config.rate
        """,
        "Config.rate",
    ),
    Kind(
        "abstract_base_with_a_metaclass",
        """
        import abc
        class Meta(abc.ABCMeta): pass
        class Base(metaclass=Meta): pass
        class One: pass
        if «0¦1»: Base.register(One)
        one = One()
        def step(x): return x * (3 if isinstance(one, Base) else 2)
        """,
        "Base",
    ),
    Kind(
        "abstract_base_of_a_library",
        """
        import numbers
        class One: pass
        if «0¦1»: numbers.Real.register(One)
        one = One()
        def step(x): return x * (3 if isinstance(one, numbers.Number) else 2)
        """,
        "numbers.Number",
    ),
    Kind(
        "table_put_into_an_installed_class",
        """
        import flax.linen as nn
        nn.Dense.sc_table = {"a": «2.0¦3.0»}
        def restore(): del nn.Dense.sc_table
        def step(x): return x * nn.Dense.sc_table["a"]
        """,
        "Dense.sc_table",
    ),
    Kind(
        "object_put_into_a_class_of_python",
        """
        import argparse
        class Config:
            def __init__(self, rate): self.rate = rate
        argparse.Action.sc_config = Config(«2.0¦3.0»)
        def restore(): del argparse.Action.sc_config
        def step(x): return x * argparse.Action.sc_config.rate
        """,
        "Action.sc_config.rate",
    ),
    Kind(
        "method_put_into_a_class_of_python",
        """
        import fractions, functools
        half = fractions.Fraction.limit_denominator
        fractions.Fraction.sc_near = functools.partialmethod(half, «2¦30»)
        def restore(): del fractions.Fraction.sc_near
        F = fractions.Fraction(1, 17)
        def step(x): return x * float(F.sc_near())
        """,
        "Fraction.sc_near",
    ),
    Kind(
        "module_version",
        """
        import module_version_other as other
        def use(module, x): return x * float(module.__version__)
        def step(x):
            alias = other
            return use(alias, x)
        # --- module_version_other.py
        __version__ = "«2.0¦3.0»"
        """,
        "__version__",
    ),
    Kind(
        "module_getattr_of_one_passed_around",
        """
        import module_getattr_other as other
        def use(module, x): return x * module.rate
        def step(x):
            alias = other
            return use(alias, x)
        # --- module_getattr_other.py
        def __getattr__(name):
            if name == "rate": return «2.0¦3.0»
            raise AttributeError(name)
        """,
        "__getattr__",
    ),
    Kind(
        "module_of_another_class",
        """
        import module_of_another_class_other as other
        def use(module, x): return x * module.rate
        def step(x):
            alias = other
            return use(alias, x)
        # --- module_of_another_class_other.py
        import sys, types
        class Lazy(types.ModuleType): rate = «2.0¦3.0»
        sys.modules[__name__].__class__ = Lazy
        """,
        "Lazy.rate",
    ),
    Kind(
        "object_in_a_module_of_python",
        """
        import argparse, logging
        logging.root.sc_config = argparse.Namespace(rate=«2.0¦3.0»)
        def step(x):
            config = logging.root.sc_config
            return x * config.rate
        """,
        "sc_config.rate",
    ),
    Kind(
        "builtins_of_their_own",
        """
        space = {"__builtins__": {"RATE": «2.0¦3.0»}}
        exec("def scale(x): return x * RATE", space)
        scale = space["scale"]
        def step(x): return scale(x)
        """,
        "RATE",
    ),
    Kind(
        "format_by_a_formatter",
        """
        import string
        class Config: pass
        config = Config()
        config.rate = «2.0¦3.0»
        def step(x): return x * float(string.Formatter().vformat("{0.rate}", (config,), {}))
        """,
        "config.rate",
    ),
    Kind(
        "cached_function_of_a_library",
        """
        import functools, os
        os.environ["SC_RATE_8"] = "«2.0¦3.0»"
        read = functools.cache(os.getenv)
        read("SC_RATE_8")
        def step(x): return x * float(read("SC_RATE_8"))
        """,
        "earlier calls",
        vouched=False,
    ),
    Kind(
        "runtime_protocol_method",
        """
        from typing import Protocol, runtime_checkable
        @runtime_checkable
        class Scales(Protocol):
            def scale(self): ...
        class One:
            def «other¦scale»(self): pass
        one = One()
        def step(x): return x * (3 if isinstance(one, Scales) else 2)
        """,
        "One.scale",
    ),
    Kind(
        "runtime_protocol_attribute",
        """
        from typing import Protocol, runtime_checkable
        @runtime_checkable
        class Scales(Protocol):
            rate: float
        class One:
            def __init__(self): self.«other¦rate» = 1.0
        one = One()
        def step(x): return x * (3 if isinstance(one, Scales) else 2)
        """,
        "one.rate",
    ),
    Kind(
        "class_that_match_takes_for_a_mapping",
        """
        import collections.abc
        class Config:
            def __getitem__(self, name): return 2.0
            def __len__(self): return 1
            def get(self, name, default=None): return 2.0
        config = Config()
        if «0¦1»: collections.abc.Mapping.register(Config)
        def step(x):
            match config:
                case {"rate": rate}: return x * rate
                case _: return x * 3
        """,
        "Config (matched as)",
    ),
    Kind(
        "frozen_attrs_class_made_anew",
        """
        import attrs
        @attrs.frozen
        class Config:
            rate: float
        config = Config(«2.0¦3.0»)
        def step(x): return x * attrs.evolve(config).rate
        """,
        "config.rate",
    ),
]

OF_THE_PROCESS = [
    Kind(
        "decimal_context",
        """
        import decimal
        one = decimal.Decimal(1)
        def context():
            return decimal.localcontext(prec=«2¦5»)
        def step(x): return x * float(one / 3)
        """,
        "decimal.getcontext()",
    ),
    Kind(
        "decimal_context_of_a_new_number",
        """
        import decimal
        def context():
            return decimal.localcontext(prec=«2¦5»)
        def step(x): return x * float(decimal.Decimal(1) / 3)
        """,
        "decimal.getcontext()",
    ),
    Kind(
        "locale_of_the_process",
        """
        import locale
        locale.setlocale(locale.LC_TIME, "«C¦C.UTF-8»")
        def step(x): return x * len(locale.setlocale(locale.LC_TIME))
        """,
        "locale",
        vouched=False,
    ),
    Kind(
        "time_zone_of_a_time_stamp",
        """
        import datetime, os, time
        os.environ["TZ"] = "«UTC¦UTC+5»"
        time.tzset()
        DAY = datetime.datetime(2020, 1, 1)
        def restore(): os.environ.pop("TZ"); time.tzset()
        def step(x): return x * (DAY.timestamp() % 86400 + 1)
        """,
        "time zone",
        vouched=False,
    ),
    Kind(
        "time_zone_of_a_date",
        """
        import datetime, os, time
        os.environ["TZ"] = "«UTC¦UTC+5»"
        time.tzset()
        def restore(): os.environ.pop("TZ"); time.tzset()
        def step(x): return x * (datetime.datetime.fromtimestamp(0).hour + 1)
        """,
        "time zone",
        vouched=False,
    ),
    Kind(
        "time_zone_that_is_converted_to",
        """
        import datetime, os, time
        os.environ["TZ"] = "«UTC¦UTC+5»"
        time.tzset()
        DAY = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
        def restore(): os.environ.pop("TZ"); time.tzset()
        def step(x): return x * (DAY.astimezone().hour + 1)
        """,
        "time zone",
        vouched=False,
    ),
    Kind(
        "all_context_variables",
        """
        import contextvars
        RATE = contextvars.ContextVar("all_context_variables")
        RATE.set(«2.0¦3.0»)
        def step(x):
            found = {each.name: value for each, value in contextvars.copy_context().items()}
            return x * found["all_context_variables"]
        """,
        "copy_context",
        vouched=False,
    ),
    Kind(
        "logger_by_its_name",
        """
        import logging
        logging.getLogger("logger_by_its_name").setLevel(«10¦40»)
        def restore(): logging.getLogger("logger_by_its_name").setLevel(0)
        def step(x):
            log = logging.getLogger("logger_by_its_name")
            return x * (3 if log.isEnabledFor(logging.INFO) else 2)
        """,
        "logger_by_its_name",
    ),
    Kind(
        "file_in_another_directory",
        """
        import contextlib
        HERE = Path(__file__).parent
        def step(x):
            with contextlib.chdir(HERE), open("data.txt") as file: return x * float(file.read())
        # --- data.txt
        «2.0¦3.0»
        """,
        "directory of the process",
        vouched=False,
    ),
    Kind(
        "file_by_its_lines",
        """
        import linecache
        HERE = Path(__file__).parent
        linecache.getline(str(HERE / "data.txt"), 1)
        def step(x): return x * float(linecache.getline(str(HERE / "data.txt"), 1))
        # --- data.txt
        «2.0¦3.0»
        """,
        "linecache",
        vouched=False,
    ),
    Kind(
        "code_of_a_function_made_anew",
        """
        import types
        def scale(x): return x * RATE
        SPACE = {"RATE": «2.0¦3.0»}
        def step(x): return types.FunctionType(scale.__code__, SPACE)(x)
        """,
        "SPACE['RATE']",
    ),
    Kind(
        "class_of_a_pickle",
        """
        import pickle
        class Config: rate = «2.0¦3.0»
        CONTENT = pickle.dumps(Config())
        def step(x): return x * pickle.loads(CONTENT).rate
        """,
        "pickle.loads",
        vouched=False,
    ),
    Kind(
        "class_of_a_pickle_by_name",
        """
        import pickle
        from pickle import loads
        class Config: rate = «2.0¦3.0»
        CONTENT = pickle.dumps(Config())
        def step(x): return x * loads(CONTENT).rate
        """,
        "_pickle.loads",
        vouched=False,
    ),
    Kind(
        "module_that_is_looked_for",
        """
        import importlib.util
        def step(x): return x * (3 if importlib.util.find_spec("looked_for_other") else 2)
        # --- «looked_for_nothing¦looked_for_other».py
        """,
        "find_spec",
        vouched=False,
    ),
    Kind(
        "value_by_its_full_name",
        """
        import pydoc
        def step(x): return x * pydoc.locate("value_by_name_other.RATE")
        # --- value_by_name_other.py
        RATE = «2.0¦3.0»
        """,
        "pydoc.locate",
        vouched=False,
    ),
    Kind(
        "distribution_of_scipy",
        """
        from scipy import stats
        normal = stats.norm(loc=«2.0¦3.0»)
        def step(x): return x * normal.mean()
        """,
        "normal.kwds['loc']",
    ),
]
