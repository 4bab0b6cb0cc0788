"""Changes of one field of a dataclass, or one key of a dictionary, that code may not name."""

from .kinds import Kind

_CLASS = """
            import dataclasses, functools
            @dataclasses.dataclass{options}
            class Config:
                rate: float = 1.0
                other: float = 1.0
            CONFIG, SAME = Config(other=«2.0¦3.0»), Config(other=2.0)
"""


def _kind(name, code, options="", before=""):
    """`code` gives another number for another field."""
    text = (
        f"{_CLASS.format(options=options)}\n{before}\n            def step(x): return x * ({code})"
    )
    return Kind(f"field_of_a_dataclass_{name}", text, "CONFIG.other")


FIELDS = [
    _kind(name, code, options)
    for name, code, options in (
        ("that_is_equal", "2 if CONFIG == SAME else 3", ""),
        ("by_its_method", "2 if Config.__eq__(CONFIG, SAME) else 3", ""),
        ("in_a_list", "2 if CONFIG in [SAME] else 3", ""),
        ("in_a_tuple", "2 if (1, CONFIG) == (1, SAME) else 3", ""),
        ("by_repr", "2 if '2' in repr(CONFIG) else 3", ""),
        ("in_a_text", "2 if '2' in f'{CONFIG}' else 3", ""),
        ("in_a_set", "2 if CONFIG in {SAME} else 3", "(frozen=True)"),
        ("that_is_a_key", "{SAME: 2}.get(CONFIG, 3)", "(frozen=True)"),
        (
            "by_its_order",
            "2 if max(CONFIG, Config(other=2.5)) is not CONFIG else 3",
            "(order=True)",
        ),
    )
]
FIELDS += [
    _kind(f"by_{name}", code, before=f"            from dataclasses import {name} as read")
    for name, code in (
        ("astuple", "read(CONFIG)[1]"),
        ("fields", "getattr(CONFIG, [each.name for each in read(CONFIG)][1])"),
        ("replace", "[*vars(read(CONFIG, rate=5.0)).values()][1]"),
    )
]
FIELDS += [
    _kind(
        "in_a_holder_of_a_function",
        "HOLDER[0](CONFIG)[1]",
        before="            HOLDER = [dataclasses.astuple]",
    ),
    _kind(
        "by_a_pattern_without_names",
        "read(CONFIG)",
        before="""
            def read(config):
                match config:
                    case Config(_, other): return other
""",
    ),
    _kind(
        "in_a_message_of_a_log",
        "2 if '2' in read() else 3",
        before="""
            import logging
            def read(): return logging.LogRecord("", 20, "", 1, "%s", (CONFIG,), None).getMessage()
""",
    ),
    _kind(
        "that_is_static",
        "read(CONFIG, x)[0] / x[0]",
        "(frozen=True)",
        before="""
            @functools.partial(jax.jit, static_argnums=0)
            def read(config, x): return x * (2 if config == SAME else 3)
""",
    ),
    Kind(
        "methods_of_a_dataclass",
        """
        import dataclasses
        @dataclasses.dataclass(eq=«True¦False»)
        class Config: rate: float = 1.0
        def step(x): return x * (2 if Config() == Config() else 3)
        """,
        "Config",
    ),
    Kind(
        "default_of_a_field",
        """
        import dataclasses
        @dataclasses.dataclass
        class Config: rate: float = «2.0¦3.0»
        def step(x): return x * Config.__dataclass_fields__["rate"].default
        """,
        "rate",
    ),
    Kind(
        "factory_of_a_field",
        """
        import dataclasses
        @dataclasses.dataclass
        class Config: rates: list = dataclasses.field(default_factory=lambda: [«2.0¦3.0»])
        def step(x): return x * Config().rates[0]
        """,
        "<lambda>",
    ),
    *(
        Kind(
            f"factory_of_a_field_that_is_{name}",
            f"""
            import dataclasses
            @dataclasses.dataclass
            class Config: rates: list = dataclasses.field(default_factory=lambda: [«2.0¦3.0»])
            def step(x): return x * {read}[0]
            """,
            "<lambda>",
        )
        for name, read in (
            ("read", 'Config.__dataclass_fields__["rates"].default_factory()'),
            ("asked_for", 'getattr(dataclasses.fields(Config)[0], "default_factory")()'),
            ("asked_of_all", "[f.default_factory() for f in dataclasses.fields(Config)][0]"),
            ("called_by_a_replacement", 'type("Sub", (Config,), {})().rates'),
        )
    ),
    Kind(
        "property_among_fields",
        """
        import dataclasses
        class Base: pass
        @dataclasses.dataclass
        class Config(Base): rate: float = dataclasses.field()
        def _set(config, rate): config.kept = rate * «2.0¦3.0»
        Base.rate = property(lambda config: config.kept, _set)
        def step(x): return x * Config(1.0).kept
        """,
        "_set",
    ),
    Kind(
        "generated_by_attrs",
        """
        import attrs
        @attrs.frozen
        class Config: rate: float = 1.0; other: float = 1.0
        CONFIG, SAME = Config(other=«2.0¦3.0»), Config(other=2.0)
        def step(x): return x * (2 if CONFIG == SAME else 3)
        """,
        "CONFIG.other",
    ),
    *(
        Kind(
            f"fields_{name}",
            f"""
            import dataclasses
            @dataclasses.dataclass
            class Inner: rate: float = 2.0
            @dataclasses.dataclass
            class Config:
                inner: list
                scale: float = dataclasses.field(default={default}, metadata={{"unit": {unit}}})
                def __post_init__(self): self.scale = self.scale * {factor}
            class Trainer:
                def __init__(self): self.config = Config([Inner({inner})])
                def run(self, x): return x * ({code})
            step = Trainer().run
            """,
            named,
        )
        for name, code, named, inner, default, unit, factor in (
            (
                "of_what_is_in_a_list",
                'dataclasses.asdict(self.config)["inner"][0].popitem()[1]',
                "rate",
                *("«2.0¦3.0»", 1.0, 1.0, 1.0),
            ),
            (
                "of_what_is_in_a_list_of_a_copy",
                "dataclasses.astuple(dataclasses.replace(self.config, scale=1.0))[0][0][0]",
                "rate",
                *("«2.0¦3.0»", 1.0, 1.0, 1.0),
            ),
            (
                "and_their_defaults",
                "dataclasses.fields(self.config)[1].default",
                "default",
                *(1.0, "«2.0¦3.0»", 1.0, 1.0),
            ),
            (
                "and_their_metadata",
                'dataclasses.fields(self.config)[1].metadata["unit"]',
                "metadata",
                *(1.0, 1.0, "«2.0¦3.0»", 1.0),
            ),
            (
                "of_a_copy_that_its_class_changes",
                "[*vars(dataclasses.replace(self.config, scale=1.0)).values()][1]",
                "__post_init__",
                *(1.0, 1.0, 1.0, "«2.0¦3.0»"),
            ),
        )
    ),
    *(
        Kind(
            f"all_fields_{name}",
            f"""
            import builtins
            import copy
            import dataclasses
            from dataclasses import replace as changed
            import attrs
            @dataclasses.dataclass
            class Config: rate: float = 1.0; other: float = 1.0
            @attrs.define
            class Made: rate: float = 1.0; other: float = 1.0
            class Own:
                rate = other = 1.0
                def replace(self): return vars(self)
                look, ways = staticmethod(vars), [vars]
            def of(module, given): return module.vars(given)
            CONFIG, MADE, OWN = Config(rate=«2.0¦3.0»), Made(rate=«2.0¦3.0»), Own()
            OWN.rate = «2.0¦3.0»
            def step(x): return x * ({code})
            """,
            "rate",
        )
        for name, code in (
            ("as_a_dictionary", "sum(dataclasses.asdict(CONFIG).values())"),
            ("as_a_tuple", "dataclasses.astuple(changed(CONFIG, other=2.0))[0]"),
            ("compared", "2 if changed(CONFIG, other=1.0) == Config(rate=2.0) else 3"),
            ("of_a_copy", "2 if copy.copy(CONFIG) == Config(rate=2.0) else 3"),
            ("of_attrs_as_a_dictionary", "sum(attrs.asdict(MADE).values())"),
            ("of_attrs_as_a_tuple", "attrs.astuple(attrs.evolve(MADE, other=1.0))[0]"),
            ("of_attrs_of_a_copy", "2 if copy.copy(MADE) == Made(rate=2.0) else 3"),
            ("by_a_function_of_a_module", "sum(builtins.vars(CONFIG).values())"),
            ("by_a_module_that_is_given", "sum(of(builtins, CONFIG).values())"),
            ("by_an_attribute", "sum(Own.look(CONFIG).values())"),
            ("by_what_is_in_a_list", "sum(OWN.ways[0](CONFIG).values())"),
            ("by_an_own_method", "sum(OWN.replace().values())"),
            ("by_an_own_method_of_a_copy", "sum(copy.copy(OWN).replace().values())"),
        )
    ),
    *(
        Kind(
            f"key_of_a_dictionary_{name}",
            f"""
            class Trainer:
                def __init__(self, config): self.config = config
                def rate(self):
                    config = self.config
                    return config["rate"]
            CONFIG = {{"other": 1.0, "rate": «2.0¦3.0»}}
            trainer = Trainer(CONFIG)
            def read(**config): return config["rate"]
            def of(config): return config["rate"]
            def step(x): return x * ({code})
            """,
            "['rate']",
        )
        for name, code in (
            ("by_a_constant", 'CONFIG["rate"]'),
            ("by_its_method", 'CONFIG.get("rate", 1.0)'),
            ("of_an_object", 'trainer.config["rate"]'),
            ("of_an_object_by_its_method", 'trainer.config.get("rate")'),
            ("of_an_object_and_as_a_whole", 'trainer.rate() * trainer.config["other"]'),
            ("by_a_variable", '[CONFIG[key] for key in ("rate",)][0]'),
            ("by_its_values", "[*CONFIG.values()][1]"),
            ("that_is_unpacked", "read(**CONFIG)"),
            ("that_is_given", "of(CONFIG)"),
            ("of_a_copy", "[*trainer.config.copy().values()][1]"),
            ("by_a_choice", '(CONFIG if x.ndim else {})["rate"]'),
        )
    ),
    Kind(
        "key_that_a_dictionary_lacks",
        """
        CONFIG = {"other": 2.0, "«unused¦rate»": 3.0}
        def step(x):
            try: return x * CONFIG["rate"]
            except KeyError: return x * CONFIG["other"]
        """,
        "CONFIG['rate']",
    ),
    Kind(
        "object_that_is_no_dictionary",
        """
        class Config:
            def get(self, key): return «2.0¦3.0»
            def __getitem__(self, key): return self.get(key)
        class Trainer: config = Config()
        def step(x): return x * Trainer.config["rate"] * Trainer.config.get("rate")
        """,
        "Config.get",
    ),
]
