"""Changes that leave the program as it is, with the level that each still reaches."""

from .kinds import Kind


def _kind(name, text, level=1):
    return Kind(name, text, level=level, same=True)


HARMLESS = [
    _kind("harmless_nothing", "def step(x): return x * 2"),
    _kind("harmless_comment", "def step(x):\n    «¦# A comment.\n    »return x * 2"),
    _kind("harmless_docstring", 'def step(x):\n    "«One¦Two»"\n    return x * 2'),
    _kind(
        "harmless_new_docstring",
        'def scale(x):\n    «¦"Two."\n    »return x * 2\ndef step(x): return scale(x)',
    ),
    _kind("harmless_module_docstring", '«¦"Text."\n»def step(x): return x * 2'),
    _kind(
        "harmless_moved_lines",
        "«¦\n\n\nX = 1\n\n»def scale(x): return x * 2\n\n\n"
        "def step(x):\n«¦\n\n»    return scale(x)",
    ),
    _kind("harmless_formatting", "def step(x): return «x * 2 + 1¦(x*2\n     +1)»"),
    _kind("harmless_other_function", "def other(x): return x * «2¦3»\ndef step(x): return x * 2"),
    _kind("harmless_other_global", "OTHER = «2¦3»\ndef step(x): return x * 2"),
    _kind("harmless_new_global", "«¦MORE = [1, 2]\n»RATE = 2\ndef step(x): return x * RATE"),
    _kind(
        "harmless_constructor",
        """
        import time
        class Trainer:
            def __init__(self):
                self.rank, self.started, self.rate = jax.process_index(), time.time(), «2.0¦1.0 + 1»
                self.seconds = [«0.1¦0.2»]  # Whose name stepcache has for attributes of its own.
            def run(self, x): return x * self.rate
        trainer = Trainer()
        step = trainer.run
        """,
    ),
    _kind(
        "harmless_constructor_beside_an_attribute_type",  # Which is not Python's `type`.
        """
        import time
        class Config:
            def __init__(self): self.type, self.rate = "mlp", 2.0
        class Model:
            def __init__(self, config): self.config, self.made = config, (time.time(), «0.1¦0.2»)
            def run(self, x): return x * self.config.rate if self.config.type == "mlp" else x
        step = Model(Config()).run
        """,
    ),
    _kind(
        "harmless_constructor_beside_a_registry_of_classes",  # Which defining a class fills.
        """
        import time
        CLASSES = {}
        class Meta(type):
            def __init__(cls, name, *given):
                super().__init__(name, *given)
                CLASSES[name] = cls
        class Base(metaclass=Meta):
            classes = []
            def __init_subclass__(cls, **given):
                super().__init_subclass__(**given)
                Base.classes.append(cls)
        class Model(Base):
            def __init__(self): self.rate, self.made = 2.0, (time.time(), «0.1¦0.2»)
            def run(self, x): return x * self.rate
        step = Model().run
        """,
    ),
    _kind(
        "harmless_constructor_beside_one_of_a_base",  # Which the step enters for another class.
        """
        import time
        class Loss:
            def __init__(self, weight): self.weight = weight
        class Masked(Loss):
            def __init__(self, mask):
                super().__init__(2.0)
                self.mask = mask
            def __new__(cls, mask): return super().__new__(cls)
        class Trainer:
            def __init__(self): self.rate, self.made = 3.0, (time.time(), «0.1¦0.2»)
            def run(self, x): return x * self.rate * Masked(x > 0).weight
        step = Trainer().run
        """,
    ),
    _kind(
        "harmless_constructor_beside_super",  # Which asks a base, and makes no object.
        """
        import functools, time
        def counted(method):
            class Counted:
                def __call__(self, *args): return method(*args)
                def __get__(self, owner, cls=None): return functools.partial(self, owner)
            return Counted()
        class Base:
            scale = 3.0
            def __init__(self): self.rate, self.made = 2.0, (time.time(), «0.1¦0.2»)
            def predict(self, x): return x * self.rate * Trainer.scale
            @staticmethod
            def halved(x): return x / 2
            def shift(self, x): return x + 1
            def run(self, x): return Base.halved(self.predict(x))
        class Trainer(Base):
            def predict(self, x):
                moved = lambda: super(Trainer, self).shift(x)
                return super().predict(moved()) + Base.predict(self, x)
            @counted
            def shift(self, x): return super().shift(x)
        step = Trainer().run
        """,
    ),
    _kind(
        "harmless_constructor_beside_class_methods",  # Which make objects of another class.
        """
        import time
        class Config:
            def __init__(self, rate): self.rate = rate
            @classmethod
            def small(cls): return cls(0.5)
            @classmethod
            def raw(cls):
                self = cls.__new__(cls)
                self.rate = 0.25
                return self
        class Trainer:
            bias = 1.0
            def __init__(self): self.rate, self.made = 3.0, (time.time(), «0.1¦0.2»)
            @classmethod
            def shifted(cls, x): return x + cls.bias
            def run(self, x):
                return self.shifted(x) * self.rate * Config.small().rate * Config.raw().rate
        step = Trainer().run
        """,
    ),
    _kind(
        "harmless_copies_of_jaxs_functions",
        """
        import copy
        relu, softplus = copy.deepcopy((jax.nn.relu, jax.nn.softplus))
        UNREAD = «0.1¦0.2»
        def step(x): return relu(x) + softplus(x)
        """,
    ),
    _kind(
        "harmless_constructor_beside_a_question_for_a_class",
        """
        import time
        class Trainer:
            def __init__(self): self.rate, self.made = 3.0, (time.time(), «0.1¦0.2»)
            def run(self, x): return x if type(self) is Other else x * self.rate
        class Other: pass
        step = Trainer().run
        """,
    ),
    *(
        _kind(
            f"harmless_constructor_of_a_class_that_is_{name}",
            f"""
            import time
            class Config:
                def __init__(self): self.rate, self.made = 3.0, (time.time(), «0.1¦0.2»)
            class Trainer:
                def __init__(self): self.config = Config()
                def run(self, x):
                    rate = self.config.rate
                    {test}
                    return x * rate
            step = Trainer().run
            """,
        )
        for name, test in (
            ("tested", "rate += isinstance(self.config, Config)"),
            ("tested_with_others", "rate += isinstance(self.config, (dict, Config | None))"),
            ("tested_for_its_kind", "rate += issubclass(bool, (dict, Config))"),
            ("compared", "rate += type(self.config) is Config"),
            (
                "a_pattern",
                "match self.config:\n                        case Config(rate=rate): pass",
            ),
        )
    ),
    *(
        _kind(
            f"harmless_constructor_of_the_type_of_a_field_{name}",
            f"""
            import dataclasses, flax.linen as nn, time, typing
            @dataclasses.dataclass
            class Config:
                label: str = dataclasses.field(default_factory=lambda: f"{{time.time()}} «1¦2»")
                width: int = 3
            class Net(nn.Module):
                config: {annotation}
                @nn.compact
                def __call__(self, x): return nn.Dense(self.config.width)(x)
            net = Net(Config())
            weights = net.init(jax.random.key(0), jnp.ones(1))
            def loss(x, config): return (net.apply(weights, x[:, None]) * config.width).sum()
            class Trainer:
                def __init__(self): self.config, self.started = net.config, time.time()
                def run(self, x): return loss(x, self.config)
            step = Trainer().run
            """,
        )
        for name, annotation in (
            ("alone", "Config"),
            ("or_none", "Config | None"),
            ("optional", "typing.Optional[Config]"),
        )
    ),
    _kind(
        "harmless_beside_a_computed_name",  # Of a module, not of an object.
        """
        class Config:
            def __init__(self): self.activation, self.directory = "gelu", "«first¦second»"
        CONFIG = Config()
        def step(x): return getattr(jax.nn, CONFIG.activation)(x)
        """,
    ),
    _kind(
        "harmless_name_of_an_attribute_of_jax",  # Of the one that measures how long it traces.
        """
        class Trainer:
            def __init__(self): self.start_time, self.rate = «1.0¦2.0», 3.0
            def run(self, x): return x * self.rate
        step = Trainer().run
        """,
    ),
    _kind(
        "harmless_names_of_a_trainer",  # Which equations of JAX and numpy's iinfo have, too.
        """
        class Trainer:
            def __init__(self):
                self.key, self.params, self.rate = jax.random.key(«1¦2»), jnp.ones(2) * «1¦2», 3.0
            def loss(self, x): return jax.random.normal(jax.random.PRNGKey(0), (8,)) @ x * self.rate
            def run(self, x): return jax.grad(self.loss)(x)
        step = Trainer().run
        """,
    ),
    _kind(
        "harmless_name_of_numpys_dates",
        """
        import numpy as np
        class Trainer:
            def __init__(self): self.started = «1.0¦2.0»
            def run(self, x): return x * (2 if isinstance(x, np.datetime64) else 3)
        step = Trainer().run
        """,
    ),
    _kind(
        "harmless_constructor_beside_a_dataclass",  # Whose methods compare classes, and name them.
        """
        import dataclasses, time
        @dataclasses.dataclass(frozen=True)
        class Config: rate: float = 3.0
        class Trainer:
            def __init__(self): self.config, self.started = Config(), [time.time(), «1¦2»]
            def run(self, x): return x * self.config.rate
        step = Trainer().run
        """,
    ),
    *(
        _kind(
            f"harmless_field_of_a_dataclass_{name}",
            f"""
            import abc, dataclasses, functools
            @dataclasses.dataclass{options}
            class Config:
                rate: float = 3.0
                run_dir: str = dataclasses.field(default_factory=lambda: "runs/«1¦2»")
                saved_at: float = «1.0¦2.0»
            config = Config()
            class Trainer(abc.ABC):
                def __init__(self): self.config, self.started_at = Config(), «1.0¦2.0»
                def run(self, x): return x * self.config.rate
            def scale(config, x): return x * config.rate
            step = {step}
            """,
        )
        for name, options, step in (
            ("that_is_global", "(slots=True)", "lambda x: x * config.rate"),
            ("that_is_captured", "(frozen=True)", "(lambda own: lambda x: x * own.rate)(config)"),
            ("of_a_trainer", "", "Trainer().run"),
            ("that_is_given", "", "functools.partial(scale, config)"),
            (
                "that_is_static",
                "(frozen=True)",
                "lambda x: jax.jit(scale, static_argnums=0)(config, x)",
            ),
        )
    ),
    _kind(
        "harmless_key_of_a_dictionary",
        """
        CONFIG = {"rate": 3.0, "run": "«1¦2»", "model": {"width": 2, "saved": «1.0¦2.0»}}
        def made(config):
            def inner(x): return x * config["rate"]
            return inner
        captured = made({"rate": 2.0, "run": "«1¦2»"})
        class Trainer:
            def __init__(self, config): self.config = config
            def scale(self):
                config = self.config
                return config["model"]["width"] * self.config.get("rate", 1.0) * config["rate"]
        trainer = Trainer(CONFIG)
        def step(x): return captured(x) * CONFIG["rate"] * CONFIG.get("bias", 0) + trainer.scale()
        """,
    ),
    _kind(
        "harmless_calls",  # Of what is the same in each run, though its relatives are not.
        """
        import os, sys
        OUT, LOG = sys.stderr, open(os.devnull, "w")
        class Strategy:
            def tell(self, x): return x * 2
        def step(x):
            «# One.¦# Two.»
            for out in (OUT, LOG):
                print("traced", np.ones(2), file=out, flush=True)
            sys.stdout.flush()
            rate = np.random.default_rng(0).normal()
            return Strategy().tell(x) * rate * len(os.path.normpath("a/../b"))
        """,
    ),
    _kind(
        "harmless_field_of_attrs",
        """
        import attrs
        @attrs.define
        class Config:
            rate: float = 3.0
            run_dir: str = attrs.field(factory=lambda: "runs/«1¦2»")
        config = Config()
        def step(x): return x * config.rate
        """,
    ),
    _kind(
        "harmless_field_beside_what_is_replaced_and_copied",
        """
        import dataclasses
        @dataclasses.dataclass
        class Config: rate: float = 3.0; run_dir: str = "runs/«1¦2»"
        config = Config()
        def step(x):
            text = "x-y".replace("-", "_")
            return x.copy() * getattr(config, "rate", 1.0) * len(text)
        """,
    ),
    _kind(
        "harmless_repr_of_a_dataclass",  # Which asks for its thread, in case that it is in itself.
        """
        import dataclasses
        @dataclasses.dataclass
        class Config: rate: float = 3.0
        config = Config()
        def step(x):
            f"{config}"
            return x * «3¦(2 + 1)» / config.rate
        """,
    ),
    _kind(
        "harmless_order_of_functions",
        """
        «def a(x): return x * 2
        def b(x): return x + 1¦def b(x): return x + 1
        def a(x): return x * 2»
        def step(x): return a(b(x))
        """,
    ),
    _kind(
        "harmless_other_global_of_a_module",
        """
        import harmless_other_module as m
        def step(x): return x * m.RATE
        # --- harmless_other_module.py
        RATE = 2.0
        OTHER = «1¦2»
        def other(): return «1¦2»
        """,
    ),
    _kind("harmless_unused_import", "«¦import json, collections\n»def step(x): return x * 2"),
    _kind("harmless_import_order", "«import json, os¦import os, json»\ndef step(x): return x * 2"),
    _kind("harmless_type_annotation", "def step(x«¦: jax.Array») «¦-> jax.Array»: return x * 2"),
    _kind(
        "harmless_annotated_helper",
        "def f(x, n«¦: int» = 2): return x * n\ndef step(x): return f(x)",
    ),
    _kind("harmless_local_name", "def step(x):\n    «a¦bb» = x * 2\n    return «a¦bb» + 1"),
    _kind(
        "harmless_parameter_name_of_helper",
        "def f(«a¦bb»): return «a¦bb» * 2\ndef step(x): return f(x)",
        2,
    ),
    _kind("harmless_global_name", "«A¦BB» = 2\ndef step(x): return x * «A¦BB»", 2),
    _kind(
        "harmless_logging_line",
        """
        import logging
        log = logging.getLogger("mine")
        def step(x):
            «¦log.debug("tracing")
            »return x * 2
        """,
        2,
    ),
    _kind(
        "harmless_method_that_a_library_could_name",
        """
        import time
        class Trainer:
            rate = 2
            def run(self): return time.time() + «1¦2»
            def update(self, x): return jnp.sin(x) * self.rate
        step = Trainer().update
        """,
    ),
    _kind(
        "harmless_repr_by_identity",
        """
        class Config:
            def __init__(self): self.rate = 2
            def __repr__(self): return f"«Config¦A config» at {id(self):x}"
        config = Config()
        def step(x): return x * config.rate
        """,
        2,
    ),
    _kind("harmless_print", 'def step(x):\n    print("«one¦two»", end="")\n    return x * 2', 2),
    _kind("harmless_assertion", "def step(x):\n    «¦assert x.ndim == 1\n    »return x * 2", 2),
    _kind("harmless_dead_code", "def step(x):\n    «¦if False: x = x * 3\n    »return x * 2", 2),
    _kind(
        "harmless_refactoring",
        """
        «¦def f(x): return x * 2»
        def step(x): return «x * 2¦f(x)»
        """,
        2,
    ),
    _kind(
        "harmless_named_scope",
        'def step(x):\n    with jax.named_scope("«one¦two»"): return x * 2',
        2,
    ),
    _kind(
        "harmless_new_attribute",
        """
        class Config:
            def __init__(self): self.rate = 2.0
        config = Config()
        «¦config.unread = 1»
        def step(x): return x * config.rate
        """,
    ),
    _kind(
        "harmless_unread_attribute",
        """
        class Config: pass
        config = Config()
        config.rate, config.unread = 2.0, "«one¦two»"
        def step(x): return x * config.rate
        """,
    ),
    _kind(
        "harmless_other_method",
        """
        class Model:
            def scale(self, x): return x * 2
            «¦def other(self, x): return x * 3»
        model = Model()
        def step(x): return model.scale(x)
        """,
    ),
    _kind(
        "harmless_class_docstring",
        """
        class Model:
            "«One¦Two»"
            def scale(self, x): return x * 2
        model = Model()
        def step(x): return model.scale(x)
        """,
    ),
    _kind(
        "harmless_other_environment_variable",
        """
        import os
        os.environ["SC_OTHER"] = "«1¦2»"
        os.environ["SC_READ"] = "2"
        def step(x): return x * float(os.environ["SC_READ"])
        """,
    ),
    _kind(
        "harmless_other_file",
        """
        HERE = Path(__file__).parent
        def step(x): return x * float((HERE / "data.txt").read_text())
        # --- data.txt
        2.0
        # --- other.txt
        «1¦2»
        """,
    ),
    _kind("harmless_unread_dict_of_a_module", "TABLE = {'a': «1¦2»}\ndef step(x): return x * 2"),
    _kind(
        "harmless_logging_level",
        """
        import logging
        logging.getLogger("sc_mine").setLevel(«10¦20»)
        def restore(): logging.getLogger("sc_mine").setLevel(0)
        def step(x): return x * 2
        """,
    ),
    _kind(
        "harmless_irrelevant_setting",
        """
        def context(): return jax.log_compiles(False)
        def step(x): return x * 2
        """,
    ),
    _kind(
        "harmless_set_of_strings",
        'NAMES = {"a", "b", "c", "d", "e", "f"}\n'
        'def step(x): return x * (2 if "a" in NAMES else 3)',
    ),
    _kind(
        "harmless_attribute_of_a_namespace_that_nobody_reads",
        """
        import argparse, types
        SPACE = types.SimpleNamespace(rate=2.0, other=«1¦2»)
        ARGUMENTS = argparse.Namespace(rate=2.0, kind="a", other=«1¦2»)
        def step(x): return x * (SPACE.rate if ARGUMENTS.kind == "a" else ARGUMENTS.rate)
        """,
    ),
    _kind(
        "harmless_argument_that_nobody_reads_beside_texts",
        """
        import argparse
        ARGUMENTS = argparse.Namespace(rate=2.0, other=«1¦2»)
        def step(x): return x * len(f"{ARGUMENTS.rate}" + str(x.ndim))
        """,
    ),
]
