"""Changes of what a wrapper's `__getattr__` passes on, by all ways in which code comes to it.

Each line below is the body of a step, which comes in its own way to `rate` of an environment in a
wrapper in another one.
"""

from .kinds import Kind

_PROGRAM = """
        import copy, functools, inspect, operator, time

        class Env:
            shared = «2.0¦3.0»
            def __init__(self): self.rate, self.options = «2.0¦3.0», {"rate": «2.0¦3.0»}
            def gain(self): return self.rate
            @property
            def slope(self): return self.rate

        class Wrapper:
            def __init__(self, env): self._env = env
            def __getattr__(self, name): GETATTR

        class Config:
            def __init__(self): self.made, self.dt = time.time(), 1.0

        def rate_of(given): return given.rate

        ENV, CONFIGS, COMPUTED = Wrapper(Wrapper(Env())), [Config()], "".join(["ra", "te"])
        ASK, ASK_OF = ENV.__getattr__, Wrapper.__getattr__

        def step(x):
            x = x * CONFIGS[0].dt
            BODY
"""
_BODIES = """
attribute: return x * ENV.rate
function: return x * rate_of(ENV)
method: return x * ENV.gain()
property: return x * ENV.slope
of_the_class: return x * ENV.shared
key: return x * ENV.options["rate"]
constant: return x * getattr(ENV, "rate")
default: return x * getattr(ENV, "rate", 5.0)
computed: return x * getattr(ENV, COMPUTED)
by_hand: return x * ENV.__getattr__("rate")
by_hand_and_computed: return x * ENV.__getattr__(COMPUTED)
unbound: return x * Wrapper.__getattr__(ENV, COMPUTED)
taken_as_a_value: ask = ENV.__getattr__; return x * ask(COMPUTED)
kept: return x * ASK(COMPUTED)
kept_unbound: return x * ASK_OF(ENV, COMPUTED)
attrgetter: return x * operator.attrgetter(COMPUTED)(ENV)
static: return x * inspect.getattr_static(ENV._env._env, COMPUTED)
copied: return x * copy.copy(ENV._env._env).rate
partial: return x * functools.partial(rate_of, ENV)()
reduced: return x * functools.reduce(getattr, [COMPUTED], ENV)
mapped: return x * [*map(rate_of, [ENV])][0]
"""
_GETATTRS = {
    "private": """
                if name.startswith("__"): raise AttributeError(name)
                return getattr(self._env, name)""",
    "with_a_default": "return getattr(self._env, name, None)",
    "by_super": """
                try: return super().__getattr__(name)
                except AttributeError: return getattr(self._env, name)""",
    "another_name": "return getattr(self._env, name + ('te' if name == 'ra' else ''))",
    "another_name_before": """
                if name == "ra": name += "te"
                return getattr(self._env, name)""",
    "another_name_in_a_loop": """
                for name in (name + "te", name):
                    if hasattr(self._env, name): return getattr(self._env, name)
                raise AttributeError(name)""",
    "by_attrgetter": "return operator.attrgetter('rate' if name == 'ra' else name)(self._env)",
    "by_vars": "return self._env.ra if '_env' in vars(self._env) else vars(self._env)[name + 'te']",
    "keywords": "return getattr(*(self._env, 'rate' if name == 'ra' else name))",
    "under_another_name_too": "return getattr(self._env, name)\n            ra = __getattr__",
}


def _kind(name, body, forward="return getattr(self._env, name)"):
    text = _PROGRAM.replace("BODY", body).replace("GETATTR", forward)
    return Kind(f"through_getattr_{name}", text, vouched=name in _VOUCHED)


_LINES = dict(line.split(": ", 1) for line in _BODIES.strip().split("\n"))
# The others may ask for any attribute, and so for the time in the configuration.
_VOUCHED = frozenset(
    "attribute function method property of_the_class key constant default partial mapped private "
    "with_a_default by_super".split()
)
_ASKED = dict.fromkeys(_GETATTRS.keys() - _VOUCHED, "ENV.ra") | {
    "under_another_name_too": "ENV.ra(COMPUTED)"
}
WRAPPED = [
    *(_kind(name, line) for name, line in _LINES.items()),
    *(
        _kind(name, f"return x * {_ASKED.get(name, 'ENV.rate')}", text)
        for name, text in _GETATTRS.items()
    ),
]
