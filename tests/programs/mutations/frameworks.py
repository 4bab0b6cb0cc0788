"""Changes in what is installed, in JAX's settings, and in how a step is declared."""

import textwrap

from .kinds import Kind

_SITE = """
import sys
sys.path.insert(0, str(Path(__file__).parent / "site-packages"))
"""

_PRIMITIVE = """
from jax.extend.core import Primitive
from jax.interpreters import mlir
mine_p = Primitive("mine")
mine_p.def_impl(lambda x: x)
mine_p.def_abstract_eval(lambda x: x)
"""

_WITH_RULES = (
    _PRIMITIVE
    + """
from jax.interpreters import ad, batching
mlir.register_lowering(mine_p, mlir.lower_fun(lambda x: x + 1, multiple_results=False))
"""
)

LOWERED = [
    Kind(
        "jvp_rule_of_mine",
        _WITH_RULES
        + """
ad.defjvp(mine_p, lambda g, x: g * «2¦3»)
def step(x): return x * jax.grad(lambda y: mine_p.bind(y).sum())(x)
""",
        "jvp_rule_of_mine.py",
    ),
    Kind(
        "transpose_rule_of_mine",
        _WITH_RULES
        + """
ad.deflinear2(mine_p, lambda cotangent, x: [cotangent * «2¦3»])
def step(x): return x * jax.grad(lambda y: mine_p.bind(y).sum())(x)
""",
        "transpose_rule_of_mine.py",
    ),
    Kind(
        "batching_rule_of_mine",
        _WITH_RULES
        + """
batching.primitive_batchers[mine_p] = lambda given, at: (mine_p.bind(given[0]) * «2¦3», at[0])
def step(x): return jax.vmap(mine_p.bind)(x)
""",
        "batching_rule_of_mine.py",
    ),
    Kind(
        "rule_of_mine_in_a_table",
        _WITH_RULES
        + """
RULES = {"mine": mine_p}
FACTOR = «2¦3»
def scaled(x): return x * FACTOR
mlir.register_lowering(mine_p, mlir.lower_fun(scaled, multiple_results=False))
def step(x): return RULES["mine"].bind(x)
""",
        "FACTOR",
    ),
    Kind(
        "lowering_rule_of_mine",
        _PRIMITIVE
        + """
mlir.register_lowering(mine_p, mlir.lower_fun(lambda x: x * «2¦3», multiple_results=False))
def step(x): return mine_p.bind(x) + 1
""",
        "lowering_rule_of_mine.py",
    ),
    Kind(
        "lowering_rule_of_mine_for_one_platform",
        _PRIMITIVE
        + """
def rule(x): return jnp.sin(x) * «2¦3»
mlir.register_lowering(mine_p, mlir.lower_fun(rule, multiple_results=False), platform="cpu")
@jax.jit
def inner(x): return mine_p.bind(x)
def step(x): return inner(x) + 1
""",
        "lowering_rule_of_mine_for_one_platform.py",
    ),
    Kind(
        "lowering_rule_of_jax_by_mine",
        """
from jax.interpreters import mlir
from jax._src.interpreters.mlir import _lowerings as rules
before = rules[jax.lax.cosh_p]
def restore(): rules[jax.lax.cosh_p] = before
mlir.register_lowering(
    jax.lax.cosh_p, mlir.lower_fun(lambda x, **_: x * «2¦3», multiple_results=False)
)
def step(x): return jax.lax.cosh(x)
""",
        "lowering_rule_of_jax_by_mine.py",
        vouched=False,
    ),
]

# What JAX has made of a function before the step is traced.
TRACED_BEFORE = [
    Kind(
        "closed_jaxpr",
        """
        from jax.extend.core import jaxpr_as_fun
        given = np.arange(1, 9, dtype=np.float32)
        JAXPR = jax.make_jaxpr(lambda x: x * «2.0¦3.0»)(given)
        def step(x): return jaxpr_as_fun(JAXPR)(x)[0]
        """,
        "JAXPR",
    ),
    Kind(
        "function_of_vjp",
        """
        given = np.arange(1, 9, dtype=np.float32)
        _, backward = jax.vjp(lambda x: x * x * «2.0¦3.0», given)
        def step(x): return backward(x)[0]
        """,
        "backward",
    ),
    Kind(
        "linear_transpose",
        """
        given = np.arange(1, 9, dtype=np.float32)
        transposed = jax.linear_transpose(lambda x: x * «2.0¦3.0», given)
        def step(x): return transposed(x)[0]
        """,
        "transposed",
    ),
    Kind(
        "shape_over_an_abstract_mesh",
        """
        mesh = jax.sharding.AbstractMesh((«2¦3»,), ("data",))
        placed = jax.sharding.NamedSharding(mesh, jax.P("data"))
        shape = jax.ShapeDtypeStruct((6,), "f4", sharding=placed)
        def step(x): return x * shape.sharding.mesh.shape["data"]
        """,
        "shape",
    ),
]

INSTALLED = [
    Kind(
        "function_of_jax_by_mine",
        """
        def mine(x): return x * 3
        before = jax.nn.gelu
        def restore(): jax.nn.gelu = before
        if «0¦1»: jax.nn.gelu = mine
        def step(x): return jax.nn.gelu(x)
        """,
        "jax.nn",
    ),
    Kind(
        "function_of_jax_by_another_of_jax",
        """
        before = jax.nn.gelu
        def restore(): jax.nn.gelu = before
        if «0¦1»: jax.nn.gelu = jax.nn.silu
        def step(x): return jax.nn.gelu(jax.nn.gelu(x))
        """,
        "jax.nn.gelu",
    ),
    Kind(
        "function_of_jax_by_a_jitted_one",
        """
        before = jax.nn.gelu
        def restore(): jax.nn.gelu = before
        if «0¦1»: jax.nn.gelu = jax.jit(lambda x: x * 3)
        def step(x): return jax.nn.gelu(x)
        """,
        "jax.nn.gelu",
    ),
    Kind(
        "function_of_jax_by_a_partial",
        """
        import functools
        before = jax.nn.gelu
        def restore(): jax.nn.gelu = before
        if «0¦1»: jax.nn.gelu = functools.partial(jax.nn.gelu, approximate=False)
        def step(x): return jax.nn.gelu(x)
        """,
        "jax.nn.gelu",
    ),
    Kind(
        "function_of_jax_used_by_optax",
        """
        import optax
        before = jax.nn.log_softmax
        def restore(): jax.nn.log_softmax = before
        if «0¦1»: jax.nn.log_softmax = jax.nn.softmax
        def step(x): return optax.softmax_cross_entropy(x, jnp.ones(8) / 8)
        """,
        "log_softmax",
    ),
    Kind(
        "jnp_function_of_a_flax_layer",
        """
        from flax import nnx
        graph, state = nnx.split(nnx.LayerNorm(8, rngs=nnx.Rngs(0)))
        before = jnp.maximum
        def restore(): jnp.maximum = before
        if «0¦1»: jnp.maximum = lambda a, b: jnp.add(a, b) + 3
        def step(x): return nnx.merge(graph, state)(x)
        """,
        "maximum",
    ),
    Kind(
        "method_of_an_installed_class",
        """
        from flax import nnx
        before = nnx.Linear.__call__
        def restore(): nnx.Linear.__call__ = before
        if «0¦1»: nnx.Linear.__call__ = lambda self, x: x * 3
        graph, state = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
        def step(x): return nnx.merge(graph, state)(x)
        """,
        "Linear.__call__",
    ),
    Kind(
        "class_attribute_of_an_installed_class",
        """
        import clsattr_pkg
        if «0¦1»: clsattr_pkg.Model.rate = 3.0
        def step(x): return clsattr_pkg.Model().scale(x)
        # --- site-packages/clsattr_pkg/__init__.py
        class Model:
            rate = 2.0
            def scale(self, x): return x * self.rate
        # --- site-packages/clsattr_pkg-1.0.dist-info/METADATA
        Metadata-Version: 2.1
        Name: clsattr_pkg
        Version: 1.0
        """.replace(
            "import clsattr_pkg", _SITE.replace("\n", "\n        ") + "import clsattr_pkg", 1
        ),
        "rate",
    ),
]


def _installed(name, user, package, named, version="1.0", **options):
    """A kind whose program uses a distribution of its own."""
    files = "".join(
        f"# --- site-packages/{name}_pkg/{file}\n{text}\n" for file, text in package.items()
    )
    metadata = f"Metadata-Version: 2.1\nName: {name}_pkg\nVersion: {version}\n"
    text = f"{_SITE}import {name}_pkg as package\n{user}\n{files}"
    text += f"# --- site-packages/{name}_pkg-1.0.dist-info/METADATA\n{metadata}"
    return Kind(name, text, named, **options)


INSTALLED += [
    _installed(
        "version_bump",
        "def step(x): return package.scale(x)",
        {"__init__.py": "def scale(x): return x * «2¦3»"},
        "version_bump_pkg",
        version="1.«0¦1»",
    ),
    _installed(
        "what_a_package_keeps_in_a_class",
        "class Mine(package.Base): rate = «2¦3»\ndef step(x): return x * Mine.rate",
        {
            "__init__.py": """
import itertools
class Base:
    def __init_subclass__(cls):
        cls.__what_a_package_keeps_in_a_class_pkg_numbers__ = itertools.count(2)
def scale(x, cls): return x * (1 + bool(cls.__what_a_package_keeps_in_a_class_pkg_numbers__))
"""
        },
        "Mine.rate",
    ),
    _installed(
        "what_a_package_reads_in_a_class",
        "class Mine(package.Base): rate = 2\ndef step(x): return package.scale(x, Mine) * «1¦2»",
        {
            "__init__.py": """
import itertools
class Base:
    def __init_subclass__(cls):
        cls.__what_a_package_reads_in_a_class_pkg_numbers__ = itertools.count(2)
def scale(x, cls): return x * (1 + bool(cls.__what_a_package_reads_in_a_class_pkg_numbers__))
"""
        },
        "_pkg_numbers__",
        vouched=False,
    ),
    _installed(
        "method_that_a_package_calls",
        "class Mine:\n    def rate(self): return «2¦3»\n"
        "mine = Mine()\ndef step(x): return package.scale(x, mine)",
        {"__init__.py": "def scale(x, config): return x * config.rate()"},
        "Mine.rate",
    ),
    _installed(
        "property_that_a_package_reads",
        "class Mine:\n    @property\n    def rate(self): return «2¦3»\n"
        "mine = Mine()\ndef step(x): return package.scale(x, mine)",
        {"__init__.py": "def scale(x, config): return x * config.rate"},
        "Mine.rate",
    ),
    _installed(
        "content_edit",
        "def step(x): return package.scale(x)",
        {"__init__.py": "def scale(x): return x * «2¦3»"},
        "content_edit_pkg",
    ),
    _installed(
        "content_edit_of_constants",
        "def step(x): return package.scale(x)",
        {
            "__init__.py": "from . import consts\ndef scale(x): return x * consts.RATE",
            "consts.py": "RATE = «2.0¦3.0»",
        },
        "consts",
    ),
    _installed(
        "content_edit_of_table",
        "def step(x): return package.scale(x)",
        {
            "__init__.py": "from .consts import T\ndef scale(x): return x * T['a']['b']",
            "consts.py": "T = {'a': {'b': «2.0¦3.0»}}",
        },
        "T",
    ),
    _installed(
        "content_edit_of_a_class",
        "def step(x): return package.scale(x)",
        {
            "__init__.py": "from .consts import C\ndef scale(x): return x * C.rate",
            "consts.py": "class C:\n    rate = «2.0¦3.0»",
        },
        "consts",
    ),
    _installed(
        "content_edit_of_an_instance",
        "def step(x): return package.scale(x)",
        {
            "__init__.py": "from .consts import C\ndef scale(x): return x * C.rate",
            "consts.py": "class K:\n    def __init__(self): self.rate = «2.0¦3.0»\nC = K()",
        },
        "",
    ),
    _installed(
        "constant_monkeypatched",
        "package.consts.RATE = «2.0¦3.0»\ndef step(x): return package.scale(x)",
        {
            "__init__.py": "from . import consts\ndef scale(x): return x * consts.RATE",
            "consts.py": "RATE = 1.0",
        },
        "RATE",
    ),
    _installed(
        "tuple_monkeypatched",
        "package.RATES = (1.0, «2.0¦3.0»)\ndef step(x): return package.scale(x)",
        {"__init__.py": "RATES = (1.0, 2.0)\ndef scale(x): return x * RATES[1]"},
        "RATES",
    ),
    _installed(
        "table_monkeypatched",
        "package.TABLE['a'] = «2.0¦3.0»\ndef step(x): return package.scale(x)",
        {"__init__.py": "TABLE = {}\ndef scale(x): return x * TABLE['a']"},
        "TABLE",
    ),
    _installed(
        "registry_monkeypatched",
        "def mine(x): return x * «2¦3»\n"
        "package.REGISTRY['a'] = mine\ndef step(x): return package.scale(x)",
        {"__init__.py": "REGISTRY = {}\ndef scale(x): return REGISTRY['a'](x)"},
        "mine",
    ),
    _installed(
        "hook_monkeypatched",
        "def mine(x): return x * «2¦3»\n"
        "package.hooks.HOOK = mine\ndef step(x): return package.scale(x)",
        {
            "__init__.py": "from . import hooks\ndef scale(x): return hooks.HOOK(x)",
            "hooks.py": "HOOK = None",
        },
        "mine",
    ),
    _installed(
        "method_swapped",
        "if «0¦1»: package.C.a = package.C.b\ndef step(x): return package.scale(x)",
        {
            "__init__.py": "class C:\n    def a(self, x): return x * 2\n"
            "    def b(self, x): return x * 3\n"
            "def scale(x): return C().a(x)"
        },
        "C.a",
    ),
    _installed(
        "data_file_of_a_package",
        "def step(x): return package.scale(x)",
        {
            "__init__.py": "def scale(x): return x * float((Path(__file__).parent / 'd.txt')"
            ".read_text())",
            "d.txt": "«2.0¦3.0»",
        },
        "d.txt",
    ),
    _installed(
        "function_of_a_factory",
        "helper = package.make(«True¦False»)\ndef step(x): return helper(x)",
        {
            "__init__.py": "def make(flag):\n    if flag:\n        def f(x): return x * 2\n"
            "    else:\n        def f(x): return x * 3\n    return f"
        },
        "helper",
    ),
    _installed(
        "default_of_a_library_function",
        "package.scale.__defaults__ = («2.0¦3.0»,)\ndef step(x): return package.scale(x)",
        {"__init__.py": "def scale(x, rate=1.0): return x * rate"},
        "scale",
    ),
    _installed(
        "state_of_a_library_object",
        "package.STATE.rate = «2.0¦3.0»\ndef step(x): return package.scale(x)",
        {"__init__.py": "class S: rate = 1.0\nSTATE = S()\ndef scale(x): return x * STATE.rate"},
        "",
    ),
    _installed(
        "library_setter",
        "package.set_rate(«2.0¦3.0»)\ndef step(x): return package.scale(x)",
        {
            "__init__.py": "RATE = 1.0\ndef set_rate(r):\n    global RATE\n    RATE = r\n"
            "def scale(x): return x * RATE"
        },
        "RATE",
    ),
]

TREES = [
    Kind(
        "custom_vjp_forward",
        """
        @jax.custom_vjp
        def f(x): return x * 2
        def forward(x): return f(x), «2.0¦3.0»
        def backward(r, g): return (g * r,)
        f.defvjp(forward, backward)
        def step(x): return jax.grad(lambda x: f(x).sum())(x)
        """,
        "forward",
    ),
    Kind(
        "custom_vjp_backward",
        """
        @jax.custom_vjp
        def f(x): return x * 2
        def forward(x): return f(x), None
        def backward(r, g): return (g * «2¦3»,)
        f.defvjp(forward, backward)
        def step(x): return jax.grad(lambda x: f(x).sum())(x)
        """,
        "backward",
    ),
    Kind(
        "custom_jvp_rule",
        """
        @jax.custom_jvp
        def f(x): return x * 2
        @f.defjvp
        def rule(primals, tangents): return f(*primals), tangents[0] * «2¦3»
        def step(x): return jax.grad(lambda x: f(x).sum())(x)
        """,
        "rule",
    ),
    Kind(
        "checkpoint",
        """
        def f(x): return jnp.sin(x) * «2¦3»
        g = jax.checkpoint(f)
        def step(x): return jax.grad(lambda x: g(x).sum())(x)
        """,
        "f",
    ),
    Kind("vmapped", "f = jax.vmap(lambda x: x * «2¦3»)\ndef step(x): return f(x)", "lambda"),
    Kind("jitted_helper", "@jax.jit\ndef f(x): return x * «2¦3»\ndef step(x): return f(x)", "f"),
    Kind(
        "jitted_helper_traced_before",
        "@jax.jit\ndef f(x): return x * «2¦3»\n"
        "f(np.arange(1, 9, dtype=np.float32))\ndef step(x): return f(x)",
        "f",
    ),
    Kind(
        "jitted_helper_static",
        """
        import functools
        @functools.partial(jax.jit, static_argnames="n")
        def f(x, n): return x * n
        N = «2¦3»
        def step(x): return f(x, n=N)
        """,
        "N",
    ),
    Kind(
        "scan_body",
        """
        def body(c, _): return c * «2¦3», None
        def step(x): return jax.lax.scan(body, x, None, length=2)[0]
        """,
        "body",
    ),
    Kind(
        "step_in_a_step",
        """
        import stepcache as sc
        @sc.step
        def inner(x): return x * «2¦3»
        def step(x): return inner(x) + 1
        """,
        "inner",
    ),
    Kind(
        "pytree_flatten_function",
        """
        class Box:
            def __init__(self, a): self.a = a
        jax.tree_util.register_pytree_node(
            Box, lambda b: ((b.a,), None), lambda _, c: Box(c[0] * «2¦3»))
        def step(x): return jax.tree.map(lambda y: y + 1, Box(x)).a
        """,
        "lambda",
    ),
    Kind(
        "pytree_node_class",
        """
        @jax.tree_util.register_pytree_node_class
        class Box:
            def __init__(self, a): self.a = a
            def tree_flatten(self): return (self.a,), None
            @classmethod
            def tree_unflatten(cls, _, c): return cls(c[0] * «2¦3»)
        def step(x): return jax.tree.map(lambda y: y + 1, Box(x)).a
        """,
        "Box.tree_unflatten",
    ),
    Kind(
        "pytree_of_the_argument",
        """
        @jax.tree_util.register_pytree_node_class
        class Box:
            def __init__(self, a): self.a = a
            def tree_flatten(self): return (self.a,), None
            @classmethod
            def tree_unflatten(cls, _, c): return cls(c[0])
            def scale(self): return self.a * «2¦3»
        arguments = (Box(np.arange(1, 9, dtype=np.float32)),)
        def step(box): return box.scale()
        """,
        "Box.scale",
    ),
    Kind(
        "pytree_key_paths",
        """
        class Box:
            def __init__(self, a): self.a = a
        K = jax.tree_util.GetAttrKey
        jax.tree_util.register_pytree_with_keys(
            Box, lambda b: (((K("«a¦bb»"), b.a),), None), lambda _, c: Box(c[0]))
        def step(x):
            named = jax.tree_util.tree_map_with_path(lambda p, y: y * len(str(p[0])), Box(x))
            return named.a
        """,
        "lambda",
    ),
    Kind(
        "pytree_auxiliary_of_the_argument",
        """
        @jax.tree_util.register_pytree_node_class
        class Box:
            def __init__(self, a, rate): self.a, self.rate = a, rate
            def tree_flatten(self): return (self.a,), self.rate
            @classmethod
            def tree_unflatten(cls, rate, c): return cls(c[0], rate)
        arguments = (Box(np.arange(1, 9, dtype=np.float32), «2.0¦3.0»),)
        def step(box): return box.a * box.rate
        """,
        "",
    ),
    Kind(
        "registered_data_class_meta_field",
        """
        import dataclasses, functools
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Box:
            a: object
            rate: float = dataclasses.field(metadata=dict(static=True))
        arguments = (Box(np.arange(1, 9, dtype=np.float32), «2.0¦3.0»),)
        def step(box): return box.a * box.rate
        """,
        "",
    ),
    Kind(
        "nnx_module_field",
        """
        from flax import nnx
        class Model(nnx.Module):
            def __init__(self, rngs, rate):
                self.linear, self.rate = nnx.Linear(8, 8, rngs=rngs), rate
            def __call__(self, x): return self.linear(x) * self.rate
        graph, state = nnx.split(Model(nnx.Rngs(0), «2.0¦3.0»))
        arguments = (state, np.arange(1, 9, dtype=np.float32))
        def step(state, x): return nnx.merge(graph, state)(x)
        """,
        "graph",
    ),
    Kind(
        "nnx_nested_module_method",
        """
        from flax import nnx
        class Inner(nnx.Module):
            def __init__(self, rngs): self.linear = nnx.Linear(8, 8, rngs=rngs)
            def __call__(self, x): return self.linear(x) * «2¦3»
        class Model(nnx.Module):
            def __init__(self, rngs): self.inner = Inner(rngs)
            def __call__(self, x): return self.inner(x)
        graph, state = nnx.split(Model(nnx.Rngs(0)))
        arguments = (state, np.arange(1, 9, dtype=np.float32))
        def step(state, x): return nnx.merge(graph, state)(x)
        """,
        "Inner.__call__",
    ),
    Kind(
        "nnx_param_metadata",
        """
        from flax import nnx
        class Model(nnx.Module):
            def __init__(self): self.w = nnx.Param(jnp.ones(8), rate=«2.0¦3.0»)
            def __call__(self, x): return self.w[...] * x * self.w.get_metadata()["rate"]
        graph, state = nnx.split(Model())
        arguments = (state, np.arange(1, 9, dtype=np.float32))
        def step(state, x): return nnx.merge(graph, state)(x)
        """,
        "rate",
    ),
    Kind(
        "nnx_captured_model",
        """
        from flax import nnx
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(«0¦1»))
        graph, state = nnx.split(model)
        def step(x): return nnx.merge(graph, state)(x)
        """,
        "state",
    ),
    Kind(
        "linen_module_attribute",
        """
        import flax.linen as nn
        class Model(nn.Module):
            rate: float
            @nn.compact
            def __call__(self, x): return nn.Dense(8)(x) * self.rate
        model = Model(«2.0¦3.0»)
        variables = model.init(jax.random.key(0), np.ones(8, np.float32))
        arguments = (variables, np.arange(1, 9, dtype=np.float32))
        def step(variables, x): return model.apply(variables, x)
        """,
        "rate",
    ),
    Kind(
        "linen_method",
        """
        import flax.linen as nn
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x): return nn.Dense(8)(x) * «2¦3»
        model = Model()
        variables = model.init(jax.random.key(0), np.ones(8, np.float32))
        arguments = (variables, np.arange(1, 9, dtype=np.float32))
        def step(variables, x): return model.apply(variables, x)
        """,
        "Model.__call__",
    ),
    Kind(
        "train_state_apply_function",
        """
        import optax
        from flax.training.train_state import TrainState
        def apply(p, x): return p * x * «2¦3»
        state = TrainState.create(apply_fn=apply, params=jnp.ones(8), tx=optax.sgd(0.1))
        arguments = (state, np.arange(1, 9, dtype=np.float32))
        def step(state, x): return state.apply_fn(state.params, x)
        """,
        "apply",
    ),
    Kind(
        "train_state_optimizer",
        """
        import optax
        from flax.training.train_state import TrainState
        def apply(p, x): return p["w"] * x
        tx = optax.sgd(«0.1¦0.2»)
        state = TrainState.create(apply_fn=apply, params={"w": jnp.ones(8)}, tx=tx)
        arguments = (state, np.arange(1, 9, dtype=np.float32))
        options = {}
        def step(state, x):
            g = jax.grad(lambda p: state.apply_fn(p, x).sum())(state.params)
            return state.apply_gradients(grads=g)
        """,
        "0.1",
    ),
    Kind(
        "optax_learning_rate",
        """
        import optax
        tx = optax.adamw(«1e-3¦1e-2»)
        arguments = (jnp.ones(8), tx.init(jnp.ones(8)))
        def step(p, s): return optax.apply_updates(p, tx.update(p, s, p)[0])
        """,
        "0.01",
    ),
    Kind(
        "optax_schedule_body",
        """
        import optax
        def schedule(count): return 0.1 * «2¦3»
        tx = optax.sgd(schedule)
        arguments = (jnp.ones(8), tx.init(jnp.ones(8)))
        def step(p, s): return tx.update(p, s, p)[0]
        """,
        "schedule",
    ),
    Kind(
        "optax_schedule_kind",
        """
        import optax
        tx = optax.sgd(optax.«constant_schedule(0.1)¦linear_schedule(0.2, 0.0, 10)»)
        arguments = (jnp.ones(8), tx.init(jnp.ones(8)))
        def step(p, s): return tx.update(p, s, p)[0]
        """,
        "tx",
    ),
    Kind(
        "optax_chain_order",
        """
        import optax
        a, b = optax.clip(0.5), optax.scale(0.2)
        tx = optax.chain(«a, b¦b, a»)
        arguments = (jnp.ones(8), tx.init(jnp.ones(8)))
        def step(p, s): return tx.update(p, s, p)[0]
        """,
        "",
    ),
    Kind(
        "optax_mask",
        """
        import optax
        tx = optax.masked(optax.scale(0.5), {"a": «True¦False», "b": False})
        p = {"a": jnp.ones(8), "b": jnp.ones(8)}
        arguments = (p, tx.init(p))
        def step(p, s): return tx.update(p, s, p)[0]
        """,
        "",
    ),
    Kind(
        "equinox_static_field",
        """
        import equinox as eqx
        class Model(eqx.Module):
            w: jax.Array
            rate: float = eqx.field(static=True)
            def __call__(self, x): return self.w * x * self.rate
        arguments = (Model(jnp.ones(8), «2.0¦3.0»), np.arange(1, 9, dtype=np.float32))
        def step(model, x): return model(x)
        """,
        "2.0 → 3.0",
    ),
    Kind(
        "equinox_method",
        """
        import equinox as eqx
        class Model(eqx.Module):
            w: jax.Array
            def __call__(self, x): return self.w * x * «2¦3»
        arguments = (Model(jnp.ones(8)), np.arange(1, 9, dtype=np.float32))
        def step(model, x): return model(x)
        """,
        "Model.__call__",
    ),
    Kind(
        "equinox_captured_activation",
        """
        import equinox as eqx
        model = eqx.nn.MLP(8, 8, 4, 1, activation=jax.nn.«relu¦tanh», key=jax.random.key(0))
        def step(x): return model(x)
        """,
        "activation",
    ),
]

PASSED_AROUND = [
    Kind(
        f"function_of_a_module_{name}",
        f"""
        import types
        NAME, PARTS = "gelu", ["ge", "lu"]
        before = jax.nn.gelu
        def restore(): jax.nn.gelu = before
        if «0¦1»: jax.nn.gelu = {value}
        {code}
        """,
        "jax.nn.gelu",
    )
    for name, value, code in (
        ("by_another_name", "lambda x: x * 3", "def step(x): nn = jax.nn; return nn.gelu(x)"),
        ("by_another_name_of_jax", "jax.nn.silu", "def step(x): nn = jax.nn; return nn.gelu(x)"),
        ("given", "jax.nn.silu", "step = lambda x: (lambda lib: lib.nn.gelu(x))(jax)"),
        ("in_a_list", "jax.nn.silu", "KEPT = [jax.nn]; step = lambda x: KEPT[0].gelu(x)"),
        (
            "in_an_object",
            "jax.nn.silu",
            "KEPT = types.SimpleNamespace(nn=jax.nn); step = lambda x: KEPT.nn.gelu(x)",
        ),
        (
            "imported_in_a_function",
            "jax.nn.silu",
            "def step(x):\n            import jax.nn as nn; return nn.gelu(x)",
        ),
        ("by_computed_name", "lambda x: x * 3", "step = lambda x: getattr(jax.nn, NAME)(x)"),
        ("by_computed_name_of_jax", "jax.nn.silu", "step = lambda x: getattr(jax.nn, NAME)(x)"),
        ("by_two_names", "jax.nn.silu", "step = lambda x: getattr(jax.nn, PARTS[0] + PARTS[1])(x)"),
        ("by_two_steps", "jax.nn.silu", "step = lambda x: getattr(jax, 'nn').gelu(x)"),
        ("by_its_namespace", "jax.nn.silu", "step = lambda x: vars(jax.nn)[NAME](x)"),
    )
]
PASSED_AROUND += [
    Kind(
        f"function_of_mine_{name}",
        f"""
        import layers_{name} as layers
        class Config: name = "double"
        CONFIG, NAME = Config(), ["double"]
        {code}
        # --- layers_{name}.py
        FACTOR = «2¦3»
        def double(x): return x * FACTOR
        """,
        f"layers_{name}.py:FACTOR",
    )
    for name, code in (
        ("by_computed_name", "def step(x): return getattr(layers, CONFIG.name)(x)"),
        ("captured", "step = (lambda lib: lambda x: getattr(lib, CONFIG.name, None)(x))(layers)"),
        ("by_a_subscript", "def step(x): return getattr(layers, NAME[0])(x)"),
    )
]

PASSED_AROUND += [
    Kind(
        f"name_in_a_module_{name}",
        f"""
        import math, statistics
        NAME = "{attribute}"
        before = vars({module}).get(NAME)
        def restore():
            if before is None: vars({module}).pop(NAME, None)
            else: {module}.{attribute} = before
        if «0¦1»: {module}.{attribute} = {value}
        {code}
        """,
        module.replace("jnp", "jax.numpy"),
    )
    for name, module, attribute, value, code in (
        ("of_python", "math", "sqrt", "math.floor", "def step(x): m = math; return x * m.sqrt(8)"),
        ("that_is_a_number", "math", "pi", "3", "def step(x): m = math; return x * m.pi"),
        (
            "written_in_python",
            "statistics",
            "mean",
            "statistics.median",
            "def step(x): m = statistics; return x * m.mean([1, 2, 9])",
        ),
        ("of_jax_that_is_a_number", "jnp", "pi", "3", "step = lambda x: x * getattr(jnp, NAME)"),
        ("that_is_new", "jax.nn", "added", "3", "step = lambda x: x * getattr(jax.nn, NAME, 2)"),
        (
            "that_is_a_new_function",
            "jax.nn",
            "added",
            "lambda: 3",
            "step = lambda x: x * getattr(jax.nn, NAME, lambda: 2)()",
        ),
    )
]

_MESH = """
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
devices = jax.devices()
def mesh(devices, shape, names):
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names,
                             axis_types=(AxisType.Auto,) * len(names))
"""


def _meshed(name, text, named, **options):
    return Kind(name, _MESH + textwrap.dedent(text), named, **options)


DECLARED = [
    Kind(
        "static_argument_value",
        'options = {"static_argnums": 1}\n'
        "arguments = (np.arange(1, 9, dtype=np.float32), «2¦3»)\ndef step(x, n): return x * n",
        "n",
    ),
    Kind(
        "static_argument_type",
        'options = {"static_argnames": "n"}\n'
        "arguments = (np.arange(1, 9, dtype=np.float32), «1¦True»)\n"
        "def step(x, n): return x * (3 if n is True else 2)",
        "n",
    ),
    Kind(
        "static_argument_object",
        """
        options = {"static_argnums": 1}
        class C:
            def __init__(self, rate): self.rate = rate
            def __hash__(self): return 1
            def __eq__(self, other): return isinstance(other, C)
        arguments = (np.arange(1, 9, dtype=np.float32), C(«2.0¦3.0»))
        def step(x, c): return x * c.rate
        """,
        "rate",
    ),
    Kind(
        "static_argument_function",
        """
        options = {"static_argnums": 1}
        def f(x): return x * «2¦3»
        arguments = (np.arange(1, 9, dtype=np.float32), f)
        def step(x, f): return f(x)
        """,
        "f",
    ),
    Kind(
        "argument_dtype",
        "arguments = (np.arange(1, 9, dtype=np.«float32¦int32»),)\n"
        "def step(x): return x / 2 + (x.dtype == np.float32)",
        "x",
    ),
    Kind(
        "argument_shape",
        "arguments = (np.ones(«8¦16», np.float32),)\ndef step(x): return x.sum()",
        "x",
    ),
    Kind(
        "argument_weak_type",
        "arguments = («np.float32(2)¦2.0»,)\n"
        "def step(x): return (x * jnp.ones(2, jnp.bfloat16)).dtype.itemsize * x",
        "x",
    ),
    Kind(
        "argument_tree",
        'arguments = ({"«a¦b»": np.ones(8)},)\n'
        'def step(d): return d.get("a", 0) * 2 + d.get("b", 0) * 3',
        "",
    ),
    Kind(
        "donation",
        'options = {«¦"donate_argnums": 0»}\n'
        "@property\ndef _(self): ...\n"
        "def __getattr__(name):\n"
        "    if name == 'arguments': return (jnp.arange(1.0, 9.0),)\n"
        "    raise AttributeError(name)\n"
        "def step(x): return x * 2",
        "donate",
        same=True,
    ),
    Kind(
        "carry",
        'options = {«¦"carry": "state"»}\n'
        "arguments = (np.ones(8, np.float32), np.ones(8, np.float32))\n"
        "def step(state, x): return state * x + 1",
        "carry",
        same=True,
    ),
    Kind(
        "keep_unused",
        'options = {"keep_unused": «False¦True»}\n'
        "arguments = (np.ones(8), np.ones(8))\ndef step(x, y): return x * 2",
        "keep_unused",
        same=True,
    ),
    Kind(
        "inline",
        'options = {"inline": «False¦True»}\ndef step(x): return x * 2',
        "inline",
        same=True,
    ),
    Kind(
        "compiler_options",
        'options = {"compiler_options": {"xla_cpu_enable_fast_math": «False¦True»}}\n'
        "def step(x): return x * 2",
        "compiler_options",
        same=True,
        level=3,
    ),
    Kind(
        "static_argument_names",
        'options = {"static_argnames": «()¦("n",)»}\n'
        "arguments = (np.arange(1, 9, dtype=np.float32), 2)\n"
        "def step(x, n): return x * (3 if isinstance(n, int) else 2)",
        "static",
    ),
    _meshed(
        "out_shardings",
        """
        m = mesh(devices, 8, ("data",))
        options = {"out_shardings": NamedSharding(m, P(«¦"data"»))}
        def step(x): return x * 2
        """,
        "out_shardings",
        same=True,
    ),
    _meshed(
        "in_shardings",
        """
        m = mesh(devices, 8, ("data",))
        options = {"in_shardings": NamedSharding(m, P(«¦"data"»))}
        def step(x): return x * 2
        """,
        "in_shardings",
        same=True,
    ),
    _meshed(
        "mesh_order",
        """
        session = {"mesh": mesh(devices«¦[::-1]», 8, ("data",))}
        def step(x): return x * 2
        """,
        "mesh",
        same=True,
    ),
    _meshed(
        "mesh_order_seen",
        """
        session = {"mesh": mesh(devices«¦[::-1]», 8, ("data",))}
        def step(x):
            f = jax.shard_map(lambda x: x * jax.lax.axis_index("data"), mesh=session["mesh"],
                              in_specs=P("data"), out_specs=P("data"))
            return f(x)
        """,
        "mesh",
        same=True,
    ),
    _meshed(
        "mesh_shape",
        """
        session = {"mesh": mesh(devices, («4, 2¦2, 4»), ("data", "model"))}
        def step(x): return x * session["mesh"].shape["data"]
        """,
        "mesh",
    ),
    _meshed(
        "mesh_axis_name",
        """
        session = {"mesh": mesh(devices, (4, 2), ("data", "«model¦other»"))}
        def step(x): return x * len(session["mesh"].axis_names[1])
        """,
        "mesh",
        same=True,
    ),
    _meshed(
        "mesh_captured",
        """
        m = mesh(devices, («4, 2¦2, 4»), ("a", "b"))
        def step(x): return x * m.shape["a"]
        """,
        "m",
    ),
    _meshed(
        "session_rules",
        """
        import stepcache as sc
        session = {"mesh": mesh(devices, 8, ("data",)),
                   "rules": sc.Rules([("x", P(«¦"data"»))])}
        def step(x): return x * 2
        """,
        "x",
        same=True,
    ),
    _meshed(
        "session_data_axis",
        """
        session = {"mesh": mesh(devices, (4, 2), ("a", "b")), "data_axis": "«a¦b»"}
        options = {"batch": "x"}
        def step(x): return x * 2
        """,
        "x",
        same=True,
    ),
    _meshed(
        "partition_spec_captured",
        """
        m = mesh(devices, 8, ("data",))
        SPEC = P(«¦"data"»)
        def step(x): return jax.lax.with_sharding_constraint(x * 2, NamedSharding(m, SPEC))
        """,
        "SPEC",
        same=True,
    ),
    Kind(
        "default_device",
        "import contextlib\n"
        "def context(): return jax.default_device(jax.devices()[«0¦1»])\n"
        "def step(x): return x * 2",
        "device",
        same=True,
    ),
]

SETTINGS = [
    Kind(
        "setting_x64",
        "def context(): return jax.enable_x64(«False¦True»)\n"
        "arguments = (2.0,)\ndef step(x): return x * jnp.zeros(2, float).dtype.itemsize",
        "x64",
    ),
    Kind(
        "setting_matmul_precision",
        'def context(): return jax.default_matmul_precision("«default¦highest»")\n'
        "def step(x): return x @ x",
        "matmul_precision",
        same=True,
    ),
    Kind(
        "setting_prng",
        'def context(): return jax.default_prng_impl("«threefry2x32¦rbg»")\n'
        "def step(x): return x * jax.random.uniform(jax.random.key(0))",
        "prng",
    ),
    Kind(
        "setting_partitionable",
        "def context(): return jax.threefry_partitionable(«True¦False»)\n"
        "def step(x): return x * jax.random.uniform(jax.random.key(0), (8,))",
        "partitionable",
    ),
    Kind(
        "setting_promotion",
        'def context(): return jax.numpy_dtype_promotion("«standard¦strict»")\n'
        "def step(x): return x * 2",
        "promotion",
        same=True,
    ),
    Kind(
        "setting_rank_promotion",
        'def context(): return jax.numpy_rank_promotion("«allow¦raise»")\n'
        "def step(x): return x * 2",
        "rank_promotion",
        same=True,
    ),
    Kind(
        "setting_debug_nans",
        "def context(): return jax.debug_nans(«False¦True»)\ndef step(x): return x * 2",
        "debug_nans",
        same=True,
    ),
    Kind(
        "setting_without_jit_name",
        "def context(): return jax.softmax_custom_jvp(«True¦False»)\n"
        "def step(x): return jax.nn.softmax(x)",
        "softmax_custom_jvp",
        same=True,
    ),
    Kind(
        "setting_read_by_the_user",
        """
        import contextlib
        @contextlib.contextmanager
        def context():
            before = jax.config.jax_log_checkpoint_residuals
            jax.config.update("jax_log_checkpoint_residuals", «False¦True»)
            yield
            jax.config.update("jax_log_checkpoint_residuals", before)
        def step(x): return x * (3 if jax.config.jax_log_checkpoint_residuals else 2)
        """,
        "jax_log_checkpoint_residuals",
    ),
]
