import jax
import numpy as np

from stepcache import jaxcompat
from stepcache.calls.key import Key, diff_settings
from stepcache.calls.signature import read
from stepcache.calls.step_spec import StepSpec
from stepcache.sharding import mesh_identity


def f(x, n=0):
    return x


def make(x=1.0, mesh=None, options=None, environment=None, fun=f, **roles) -> Key:
    recipe = StepSpec.of(fun, options or {}, **roles)
    environment = jaxcompat.environment() if environment is None else environment
    signature = read(recipe.parameters, (x,), {}).signature
    return Key(recipe.identity, signature, mesh_identity(mesh), recipe.key_options, environment)


def one_axis():
    return jax.make_mesh((8,), ("data",))


def test_equal_parts_make_equal_keys():
    assert make() == make() and hash(make()) == hash(make())


def test_each_part_makes_another_key():
    base = make()
    others = [
        make(np.ones(2)),
        make(mesh=one_axis()),
        make(options={"donate_argnums": (0,)}),
        make(options={"static_argnames": "n"}),
        make(options={"compiler_options": {"a": 1}}),
        make(carry=("x",)),
        make(batch=("x",)),
        make(environment=(("jax_enable_x64", True),)),
        make(fun=lambda x: x),
    ]
    keys = [base, *others]
    assert len(set(keys)) == len(keys)


def test_settings_are_told_apart():
    before = make(environment=(("jax_enable_x64", False), ("gone", 1)))
    after = make(environment=(("jax_enable_x64", True),), mesh=one_axis())
    told = {
        change.path: (change.part, change.before, change.after)
        for change in diff_settings(before, after)
    }
    assert told == {
        "mesh": ("mesh", "none", f"{{'data': {jax.device_count()}}}"),
        "jax_enable_x64": ("config", "False", "True"),
        "gone": ("config", "1", "None"),
    }


def test_the_environment_has_what_changes_a_program():
    names = {name for name, _ in jaxcompat.environment()}
    expected = {
        "jax_enable_x64",
        "jax_default_matmul_precision",
        "jax_default_prng_impl",
        "jax_debug_nans",
    }
    assert expected <= names
    assert hash(jaxcompat.environment()) == hash(jaxcompat.environment())
