"""Changes of attributes that code reads by a key, or by a method from elsewhere."""

from .kinds import Kind

_CLASS = """
        class Config:
            def __init__(self): self.rate, self.other = «2.0¦3.0», 1.0
            {method}
        CONFIG = Config()
        def step(x): return x * ({code})
"""

KEYS = [
    Kind(f"attribute_by_a_key_{name}", _CLASS.format(method=method, code=code), "CONFIG.rate")
    for name, method, code in (
        ("of_its_dict", "def __getitem__(self, key): return self.__dict__[key]", 'CONFIG["rate"]'),
        ("by_getattr", "def __getitem__(self, key): return getattr(self, key)", 'CONFIG["rate"]'),
        ("by_a_slot", "__getitem__ = object.__getattribute__", 'CONFIG["rate"]'),
        ("by_a_method", "get = object.__getattribute__", 'CONFIG.get("rate")'),
        ("that_pops", "def pop(self, key): return vars(self)[key]", 'CONFIG.pop("rate")'),
        (
            "where_it_is_set",
            "def __setitem__(self, key, to): to.append(getattr(self, key))",
            "[found := [], CONFIG.__setitem__('rate', found), found[0]][-1]",
        ),
        ("of_vars", "", 'vars(CONFIG)["rate"]'),
        ("in_a_row", "", 'sum(getattr(CONFIG, name) for name in ("rate",))'),
        ("in_a_dictionary", "", '[getattr(CONFIG, key) for key in {"rate": 1, "other": 2}][0]'),
        ("of_a_call", "", "[getattr(CONFIG, key) for key in dict(rate=1)][0]"),
        ("of_an_alias", "look = staticmethod(getattr)", 'CONFIG.look(CONFIG, "rate")'),
    )
]
KEYS += [
    Kind(
        "attribute_that_an_object_has_by_a_key",
        """
        class Config:
            def __contains__(self, key): return hasattr(self, key)
        CONFIG = Config()
        CONFIG.«rate¦other» = 1
        def step(x): return x * 2 if "rate" in CONFIG else x * 3
        """,
        "CONFIG",
    ),
    Kind(
        "argument_that_a_namespace_has_by_a_key",
        """
        import argparse
        CONFIG = argparse.Namespace(«rate¦other»=1)
        def step(x): return x * 2 if "rate" in CONFIG else x * 3
        """,
        "CONFIG",
    ),
    Kind(
        "attribute_of_a_module_by_a_key",
        """
        import types
        MODULE = types.ModuleType("of_the_user")
        MODULE.rate = «2.0¦3.0»
        class Holder: pass
        holder = Holder()
        holder.get = MODULE.__getattribute__
        def step(x): return x * holder.get("rate")
        """,
        "rate",
    ),
    Kind(
        "attribute_by_the_equality_of_a_key",
        """
        class Key:
            def __eq__(self, other): return getattr(CONFIG, other) > 2
        class Config: rate = «2.0¦3.0»
        CONFIG, KEY = Config(), Key()
        def step(x): return x * 2 if KEY == "rate" else x * 3
        """,
        "Config.rate",
    ),
]
KEYS += [
    Kind(
        f"attribute_by_a_method_of_flax_{name}",
        f"""
        from flax.nnx import metrics
        class Mine:
            def __init__(self): self.total, self.count = jnp.array(«2.0¦3.0»), jnp.array(1.0)
            {method}
        MINE = Mine()
        def step(x): return x * {code}
        """,
        "MINE.total",
    )
    for name, method, code in (
        ("put_into_a_class", "compute = metrics.Average.compute", "MINE.compute()"),
        ("called_with_an_own_object", "", "metrics.Average.compute(MINE)"),
    )
]
