"""Changes of attributes of objects that frameworks are not given, by all that code can do with one.

A walk knows which attributes the user's code reads of these, and no code of others reads any. Each
line below is the body of a step, which comes in its own way to `rate` of the trainer or of its
configuration.
"""

from .kinds import Kind

_PROGRAM = """
        import abc, copy, functools, inspect, operator, types

        class Base: pass

        class Config(Base):
            def __init__(self, rate): self.rate = rate
            METHOD

        class Trainer(Config):
            def __init__(self):
                super().__init__(«2.0¦3.0»)
                self.config, self.other = Config(«2.0¦3.0»), Config(5.0)
                self.options = {"rate": «2.0¦3.0», "other": 1.0}
            def step(self, x):
                BODY

        class Box: pass
        BOX = Box()
        BOX.options = 1

        def options_of(given): return given.options
        def rate_of(given, more=0): return given.rate + more

        TRAINER = Trainer()
        step = TRAINER.step
"""
_BODIES = """
self: return x * self.rate
attribute: return x * self.config.rate
alias: own = self; return x * own.rate
alias_of_an_attribute: config = self.config; return x * config.rate
alias_in_the_place_of_an_argument: y = x; x = self.config; return y * x.rate
alias_that_is_set_later: own, y = None, x
  for _ in range(2):
    if own is not None: y = x * own.rate
    own = self.config
  return y
alias_that_is_captured: config = self.config; return (lambda y: y * config.rate)(x)
lambda: return jax.tree.map(lambda y: y * self.rate, x)
lambda_in_a_lambda: return (lambda: (lambda: x * self.config.rate)())()
class_inside:
  class Inside:
    def read(this): return self.rate
  return x * Inside().read()
either: return x * (self.config if x.ndim else self.other).rate
either_alias: own = self.config if x.ndim else self.other; return x * own.rate
or: return x * (None or self.config).rate
or_alias: own = self.config or self.other; return x * own.rate
and: return x * (self.other and self.config).rate
walrus: return x * (own := self).rate
walrus_of_an_attribute: return x * own.rate if (own := self.config) is not None else x
several: a, b = self.config, self.other; return x * a.rate
two_at_once: a = b = self.config; return x * b.rate
swapped: a, b = x, self; a, b = b, a; return b * a.rate
starred: first, *more = self, x; return more[0] * first.rate
loop:
  for own in (self,): x = x * own.rate
  return x
comprehension: return x * [own.rate for own in [self]][0]
generator_expression: return x * next(own.rate for own in [self])
positional: return x * (lambda given: given.rate)(self)
keyword: return x * (lambda given: given.rate)(given=self)
among_arguments: return x * (lambda *given: given[0].rate)(self)
default: return x * (lambda given=self: given.rate)()
keyword_default: return x * (lambda *, given=self: given.rate)()
function: return x * rate_of(self)
function_given_an_attribute: return x * rate_of(self.config)
function_in_an_attribute: self.of = rate_of; return x * self.of(self)
partial: return x * functools.partial(rate_of, self)()
unbound: return x * rate_of.__get__(self)()
bound_by_hand: return x * types.MethodType(rate_of, self)()
list: box = [self]; return x * box[0].rate
dictionary: box = {"own": self}; return x * box["own"].rate
attribute_of_another: box = Box(); box.own = self.config; return x * box.own.rate
attribute_of_a_class: Box.own = self.config; return x * Box.own.rate
tuple_returned: return x * (lambda: (self, 1))()[0].rate
returned: return x * (lambda: self)().rate
global: global KEPT; KEPT = self; return x * KEPT.rate
nonlocal: own = None
  def keep():
    nonlocal own
    own = self
  keep()
  return x * own.rate
raised:
  try: raise ValueError(self)
  except ValueError as error: return x * error.args[0].rate
from_an_error:
  try: self.missing
  except AttributeError as error: return x * error.obj.rate
matched:
  match self:
    case Config(rate=found): return x * found
matched_attribute:
  match self.config:
    case Config() as own: return x * own.rate
key: return x * self.options["rate"]
key_of_an_alias: options = self.options; return x * options.get("rate")
key_that_is_computed: return x * sum(self.options[key] for key in sorted(self.options))
getattr: return x * getattr(self, "rate")
getattr_of_an_attribute: return x * getattr(self.config, "rate", 1)
getattr_by_a_computed_name: return x * getattr(self.config, "ra" + x.dtype.name[:0] + "te")
hasattr: return x * (2 if hasattr(self.config, "rate") else 1) * self.config.rate
vars: return x * vars(self)["rate"]
dict: return x * self.config.__dict__["rate"]
getattribute: return x * object.__getattribute__(self, "rate")
getter: return x * operator.attrgetter("rate")(self)
getter_of_two: return x * operator.attrgetter("config.rate")(self)
copied: return x * copy.copy(self.config).rate
locals: return x * locals()["self"].rate
eval: return x * eval("self.rate")
closure: return x * inspect.getclosurevars(lambda: self).nonlocals["self"].rate
frame: return x * inspect.currentframe().f_locals["self"].rate
global_object: return x * TRAINER.rate
attribute_of_a_global: return x * TRAINER.config.rate
alias_of_a_global: own = TRAINER; return x * own.rate
alias_of_an_attribute_of_a_global: config = TRAINER.config; return x * config.rate
alias_of_a_global_in_a_lambda: own = TRAINER.config; return (lambda: x * own.rate)()
"""
_WITH_METHODS = """
method: def read(self): return self.rate
  return x * self.read()
method_of_an_attribute: def read(self): return self.rate
  return x * self.config.read()
method_with_another_name_for_self: def read(this): return this.rate
  return x * self.config.read()
method_that_is_kept: def read(self): return self.rate
  read = self.read; return x * read()
method_that_is_passed: def over(self, x): return x * self.rate
  return jax.tree.map(self.over, x)
method_under_a_transformation: def over(self, x): return (x * self.rate).sum()
  return jax.grad(self.over)(x)
method_of_its_class: def read(self): return self.rate
  return x * Config.read(self)
method_of_its_type: def read(self): return self.rate
  return x * type(self).read(self)
method_of_its_class_attribute: def read(self): return self.rate
  return x * self.__class__.read(self.config)
method_by_super: def read(self): return self.rate
  return x * super().read()
method_by_an_alias_of_super: def read(self): return self.rate
  base = super(); return x * base.read()
object_of_super: def read(self): return self.rate
  return x * super().__self__.rate
from_its_method: def read(self): pass
  return x * self.read.__self__.rate
from_a_method_that_is_passed: def read(self): pass
  return x * (lambda read: read.__self__.rate)(self.read)
by_a_caller: def read(self): return self.rate
  return x * operator.methodcaller("read")(self)
returned_by_a_method: def me(self): return self
  return x * self.me().rate
returned_by_a_method_of_an_attribute: def me(self): return self
  return x * self.config.me().rate
yielded: def steps(self): yield self
  return x * next(self.steps()).rate
passed_by_a_method: def read(self): return rate_of(self)
  return x * self.read()
kept_by_a_method: def keep(self, box): box.own = self
  box = Box(); self.keep(box); return x * box.own.rate
property: rate2 = property(lambda self: self.rate)
  return x * self.rate2
property_that_gives_it: inner = property(lambda self: self)
  return x * self.config.inner.rate
property_that_passes_it: rate2 = property(lambda self: rate_of(self))
  return x * self.config.rate2
cached_property: kept = functools.cached_property(lambda self: self.rate)
  return x * self.config.kept
descriptor: rate2 = type("Descriptor", (), {"__get__": lambda _, owner, kind=None: owner.rate})()
  return x * self.config.rate2
descriptor_of_python: rate2 = types.DynamicClassAttribute(lambda self: self.rate)
  return x * self.config.rate2
abstract_property: rate2 = abc.abstractproperty(lambda self: self.rate)
  return x * self.config.rate2
slot: read = rate_by_getattribute = object.__getattribute__
  return x * self.config.read("rate")
static_method: of = staticmethod(lambda given: given.rate)
  return x * self.of(self.config)
class_method: of = classmethod(lambda cls, given: given.rate)
  return x * self.of(self.config)
dispatched: read = functools.singledispatchmethod(lambda self, kind: self.rate)
  return x * self.config.read(1)
partial_method: read = functools.partialmethod(lambda self, more: self.rate + more, 0)
  return x * self.config.read()
remembering: read = functools.cache(lambda self: self.rate)
  return x * self.config.read()
jitted: over = jax.jit(lambda self, x: x * self.rate, static_argnums=0)
  return self.config.over(x)
jitted_twice: STATIC = {"static_argnums": 0}
  over = jax.jit(jax.jit(lambda self, x: x * self.rate, **STATIC), **STATIC)
  ---
  return self.config.over(x)
with_a_rule: over = jax.custom_vjp(lambda self, x: x * 5, nondiff_argnums=(0,))
  over.defvjp(lambda self, x: (x * 5, None), lambda given, kept, g: (g * given.rate,))
  ---
  return jax.grad(lambda y: Config.over(self.config, y).sum())(x)
checkpointed: over = jax.checkpoint(lambda self, x: x * self.rate, static_argnums=0)
  return self.config.over(x)
wrapped: over = functools.wraps(copy.copy)(lambda *given: given[0].rate * given[1])
  return self.config.over(x)
called: def __call__(self): return self.rate
  return x * self.config()
called_itself: def __call__(self): return self.rate
  return x * self()
called_and_passed: def __call__(self): return rate_of(self)
  return x * self.config()
entered: def __enter__(self): return self
  def __exit__(self, *exception): pass
  ---
  with self as own: return x * own.rate
attribute_that_is_entered: def __enter__(self): return self.rate
  def __exit__(self, *exception): pass
  ---
  with self.config as rate: return x * rate
subscript: def __getitem__(self, key): return self.rate
  return x * self.config["any"]
contains: def __contains__(self, key): return self.rate > 2
  return x * 2 if "any" in self.config else x * 3
truth: def __bool__(self): return self.rate > 2
  return x * 2 if self.config else x * 3
truth_of_itself: def __bool__(self): return self.rate > 2
  return x * 2 if self else x * 3
not: def __len__(self): return int(self.rate - 2)
  return x * 2 if not self.config else x * 3
iterated: def __iter__(self): return iter([self.rate])
  return x * [*self.config][0]
unpacked: def __iter__(self): return iter([self.rate])
  rate, = self.config; return x * rate
formatted: def __format__(self, spec): return str(self.rate)
  return x * float(f"{self.config}")
shown: def __repr__(self): return str(self.rate)
  return x * float(repr(self.config))
compared: def __eq__(self, other): return self.rate < other.rate - 2
  return x * 2 if self.config == self.other else x * 3
compared_with_none: def __eq__(self, other): return self.rate > 2
  return x * 2 if self.config == None else x * 3
negated: def __neg__(self): return self.rate
  return x * -self.config
multiplied: def __rmul__(self, x): return x * self.rate
  return 3.0 * self.config * x
index: def __index__(self): return int(self.rate)
  return x * [1, 2, 3, 4][self.config]
computed: def __getattr__(self, name): return vars(self)["ra" + name]
  return x * self.config.te
any_attribute: def __getattribute__(self, name): return super().__getattribute__(name.strip("_"))
  return x * self.config.rate_
key_beside_the_whole: def read(self): return self.options["rate"]
  return x * options_of(BOX) * self.read()
whole_beside_a_key: def read(self, box): return box.options
  return x * self.options["rate"] * self.read(BOX)
set: def __setattr__(self, name, value): vars(self)[name] = value + 1 if name == "rate" else value
  return x * self.rate
"""


def _parts(text: str) -> dict[str, list[str]]:
    """The lines that belong to each name in a table."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in filter(None, text.split("\n")):
        if line.startswith("  "):
            found[name].append(line.removeprefix("  "))
        else:
            name, _, first = line.partition(":")
            found[name] = [first.strip()] if first.strip() else []
    return found


def _kind(name: str, method: list[str], body: list[str]) -> Kind:
    text = _PROGRAM.replace("METHOD", ("\n" + " " * 12).join(method))
    text = text.replace("BODY", ("\n" + " " * 16).join(body))
    return Kind(f"confined_{name}", text, "", vouched=name not in _TRACED)


def _with_methods(name: str, lines: list[str]) -> Kind:
    end = lines.index("---") if "---" in lines else 1
    return _kind(name, lines[:end], [line for line in lines[end:] if line != "---"])


# They ask for what is not known beforehand, so each start traces the step.
_TRACED = frozenset("eval closure frame".split())
CONFINED = [
    *(_kind(name, [], lines) for name, lines in _parts(_BODIES).items()),
    *(_with_methods(name, lines) for name, lines in _parts(_WITH_METHODS).items()),
]
