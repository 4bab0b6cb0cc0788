"""How leaves lie in buffers: laws over random trees, dtypes, shapes and thresholds."""

import gc
import math
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import raw
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stepcache.variables import transfer
from stepcache.variables.packing import (
    PACKED_BELOW_BYTES,
    Packed,
    Slot,
    layout_of,
)

DTYPES = [
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int16", "int8", "uint8"),
    *("uint32", "bool", "complex64", "int4", "uint4"),
]

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
kinds = st.tuples(shapes, st.sampled_from([*DTYPES, "weak", "key"]))
trees = st.recursive(
    kinds | st.none(),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.sampled_from("abcd"), children, max_size=4)
        | st.tuples(children, children)
    ),
    max_leaves=12,
)
thresholds = st.sampled_from([0, 1, 8, 64, 1 << 20]) | st.integers(0, 256)


def is_kind(node) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], str)


def filled(kind, seed: int):
    """An array of a kind, with bits of its own."""
    shape, dtype = kind
    generator = np.random.default_rng(seed)
    if dtype == "key":
        return jax.random.split(jax.random.key(seed), math.prod(shape)).reshape(shape)
    if dtype == "weak":
        return jnp.full(shape, 1.0) if shape else float(seed)
    return generator.integers(0, 8, shape).astype(jnp.dtype(dtype))


def described(tree) -> tuple[Slot, ...]:
    named = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(
        Slot(
            jax.tree_util.keystr(keys, simple=True, separator="/"),
            np.shape(leaf),
            jax.typeof(leaf).dtype,
            jax.typeof(leaf).weak_type,
            None,
        )
        for keys, leaf in named
    )


def arrays(kind_tree):
    """A tree of arrays, and how to lay it out."""
    count = iter(range(100))
    tree = jax.tree.map(lambda kind: filled(kind, next(count)), kind_tree, is_leaf=is_kind)
    return tree, jax.tree.structure(tree), described(tree)


@given(trees, thresholds)
def test_unpacking_what_was_packed_gives_it_back(kind_tree, threshold):
    """On the host, in a program, and from one to the other."""
    tree, structure, leaves = arrays(kind_tree)
    layout = layout_of(structure, leaves, threshold)
    given_leaves = jax.tree.leaves(tree)
    on_host = transfer.pack(given_leaves, layout)
    in_program = layout.pack([jnp.asarray(leaf) for leaf in given_leaves])
    for one, other, buffer in zip(on_host.buffers, in_program, layout.buffers, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype) == (buffer.shape, buffer.dtype)
        assert one.aval.weak_type == other.aval.weak_type == buffer.weak_type
        assert raw(one).tobytes() == raw(other).tobytes()
    for back in (
        transfer.unpack(on_host),
        layout.unpack(on_host.buffers),
        layout.unpack(in_program),
        jax.tree.leaves(Packed(layout, in_program).value()),
    ):
        for before, after, slot in zip(given_leaves, back, layout.slots, strict=True):
            assert (np.shape(before), slot.dtype) == (after.shape, after.dtype)
            assert raw(jnp.asarray(before)).tobytes() == raw(after).tobytes()
    assert jax.tree.structure(Packed(layout, in_program).value()) == structure


@given(trees, thresholds)
def test_buffers_are_covered_once_and_hold_what_belongs_together(kind_tree, threshold):
    _, structure, leaves = arrays(kind_tree)
    layout = layout_of(structure, leaves, threshold)
    members: dict[int, list] = {number: [] for number in range(len(layout.buffers))}
    for slot in layout.slots:
        members[slot.buffer].append(slot)
    for buffer, slots in zip(layout.buffers, members.values(), strict=True):
        assert {slot.dtype for slot in slots} == {buffer.dtype}
        if slots[0].offset is None:
            assert len(slots) == 1 and slots[0].shape == buffer.shape
            continue
        assert len(slots) > 1, "one small leaf alone gains nothing"
        ends = [0, *np.cumsum([slot.size for slot in slots])]
        assert [slot.offset for slot in slots] == ends[:-1] and buffer.shape == (ends[-1],)
        assert all(slot.size_bytes < threshold for slot in slots)
    assert [slot.path for slot in layout.slots] == [leaf.path for leaf in leaves]
    sizes = [buffer.size * buffer.dtype.itemsize for buffer in layout.buffers]
    assert layout.size_bytes == sum(sizes)
    alone = [
        leaf for leaf in leaves if leaf.weak_type or jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    assert len(layout.buffers) >= len(alone)


@given(trees, trees, thresholds, thresholds)
def test_equal_descriptions_have_one_layout_and_others_another(one, other, first, second):
    (_, structure, leaves), (_, other_structure, others) = arrays(one), arrays(other)
    layout = layout_of(structure, leaves, first)
    assert layout_of(structure, (*leaves,), first) is layout
    _, again, described_again = arrays(one)
    assert layout_of(again, described_again, first) is layout
    same = (structure, leaves, first) == (other_structure, others, second)
    assert (layout_of(other_structure, others, second) is layout) == same
    packed = Packed(layout, ())
    assert jax.tree.structure(packed) == jax.tree.structure(Packed(layout, ()))


@pytest.mark.parametrize(
    "change",
    [
        {"path": "other"},
        {"shape": (3,)},
        {"dtype": np.dtype("int32")},
        {"weak_type": True},
        {"sharding": jax.sharding.SingleDeviceSharding(jax.devices()[0])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_in_a_description_counts(change):
    structure = jax.tree.structure([0, 0])
    leaf = Slot("0", (2,), np.dtype("float32"), False, None)
    layout = layout_of(structure, (leaf, leaf))
    changed = layout_of(structure, (leaf, leaf._replace(**change)))
    assert changed is not layout
    assert jax.tree.structure(Packed(changed, ())) != jax.tree.structure(Packed(layout, ()))


def test_what_shares_a_buffer(mesh):
    def leaf(shape=(2,), dtype="float32", weak=False, sharding=None):
        return Slot("x", shape, jnp.dtype(dtype), weak, sharding)

    whole, also_whole = NamedSharding(mesh, P()), NamedSharding(mesh, P(None))
    split = NamedSharding(mesh, P("data"))
    size = PACKED_BELOW_BYTES // 4

    def buffers(*leaves):
        structure = jax.tree.structure([0] * len(leaves))
        return len(layout_of(structure, leaves, PACKED_BELOW_BYTES).buffers)

    assert buffers(leaf(), leaf()) == 1
    assert buffers(leaf(), leaf((0, 3)), leaf(())) == 1
    assert buffers(leaf((size - 1,)), leaf()) == 1
    assert buffers(leaf((size,)), leaf()) == 2
    assert buffers(leaf(), leaf(dtype="bfloat16")) == 2
    assert buffers(leaf(weak=True), leaf(weak=True)) == 2
    assert buffers(leaf(dtype="int4"), leaf(dtype="int4")) == 2
    assert buffers(leaf(), leaf(sharding=whole)) == 2
    assert buffers(leaf(sharding=whole), leaf(sharding=NamedSharding(mesh, P()))) == 1
    assert buffers(leaf(sharding=whole), leaf((2, 2), sharding=also_whole)) == 1
    assert buffers(leaf((8,), sharding=split), leaf((8,), sharding=split)) == 2
    key = jax.random.key(0).dtype
    described_keys = (Slot("k", (), key, False, None),) * 2
    structure = jax.tree.structure([0, 0])
    assert len(layout_of(structure, described_keys, PACKED_BELOW_BYTES).buffers) == 2
    assert len(layout_of(structure, (leaf(), leaf())).buffers) == 2, "nobody asked"


def test_many_threads_get_one_layout():
    structure, found = jax.tree.structure([0] * 50), []
    start = threading.Barrier(8)

    def work():
        each = (Slot(str(n), (n, 7), np.dtype("float32"), False, None) for n in range(50))
        leaves = tuple(each)
        start.wait()
        found.append(layout_of(structure, leaves, 12345))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_a_layout_goes_when_nobody_has_it():
    structure = jax.tree.structure([0])
    leaves = (Slot("a leaf of its own", (31,), np.dtype("float32"), False, None),)
    kept = layout_of(structure, leaves)
    assert layout_of(structure, leaves) is kept
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None
