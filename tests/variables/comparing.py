"""What "the same" means of a plain tree and `Variables`: bits, types, weak types, placement."""

import jax
import jax.numpy as jnp
import numpy as np

from stepcache.variables import transfer
from stepcache.variables.masters import Reader


def raw(leaf) -> np.ndarray:
    """The content of a leaf, random keys by their data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def copied(tree):
    """The same tree in memory of its own, so that a step may donate it."""
    return jax.tree.map(lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, tree)


def assert_same_leaf(expected, got, path="", *, bits=True) -> None:
    """That two arrays agree; with `bits=False`, floating point values only nearly."""
    assert isinstance(got, jax.Array), path
    expected = expected if isinstance(expected, jax.Array) else jnp.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), path
    assert got.aval.weak_type == expected.aval.weak_type, path
    assert got.committed == expected.committed, path
    assert got.sharding.device_set == expected.sharding.device_set, path
    assert got.sharding.is_equivalent_to(expected.sharding, got.ndim), path
    if bits or not jnp.issubdtype(got.dtype, jnp.floating):
        assert raw(got).tobytes() == raw(expected).tobytes(), path
    else:
        np.testing.assert_allclose(raw(got), raw(expected), rtol=1e-5, atol=1e-6, err_msg=path)


def assert_same(expected, got, *, bits=True) -> None:
    """That two trees agree in everything a program or a person can see."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    named = jax.tree_util.tree_flatten_with_path(expected)[0]
    for (keys, leaf), other in zip(named, jax.tree.leaves(got), strict=True):
        assert_same_leaf(leaf, other, jax.tree_util.keystr(keys), bits=bits)


def assert_same_in_numpy(expected, got) -> None:
    """That a tree has come in numpy's memory, but for what only JAX can hold: keys, weak types."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    named = jax.tree_util.tree_flatten_with_path(expected)[0]
    for (keys, leaf), other in zip(named, jax.tree.leaves(got), strict=True):
        path, leaf = jax.tree_util.keystr(keys), jnp.asarray(leaf)
        if leaf.aval.weak_type or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            assert_same_leaf(leaf, other, path)
        else:
            assert type(other) is np.ndarray and other.flags.writeable, path
            assert (other.shape, other.dtype) == (leaf.shape, leaf.dtype), path
            assert other.tobytes() == raw(leaf).tobytes(), path


def arrays_of(variables):
    """The arrays that hold the value, which are the user's only until the next write."""
    return list(variables._master.arrays())


def lose(variables):
    """Deletes what holds the value, as a program that fails has donated what it was given."""
    for array in arrays_of(variables):
        array.delete()


def on_devices(variables):
    """The tree as the devices have it when a step takes it."""
    packed = variables._master.take(Reader(None, carried=True), transfer.Meter())
    leaves = transfer.unpack(packed)
    return variables._layout.tree.unflatten(leaves)
