"""`Session(max_step_bytes=...)`: a call that would move more raises before it moves anything."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache import jaxcompat
from stepcache.events import Moved, recorder
from stepcache.variables.plan import HOST_LINK

V = 4 * 10_000


@pytest.fixture
def eight():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture
def moved():
    """The `Moved` events of the test."""
    events = []
    end = recorder.subscribe(lambda event: events.append(event) if type(event) is Moved else None)
    yield events
    end()


def live():
    """Every live array, by identity and by what it holds of which memory."""
    gc.collect()
    return sorted(
        (id(array), array.nbytes, str(array.sharding))
        for array in jax.live_arrays()
        if not array.is_deleted()
    )


def adder(**options):
    return sc.step(lambda state, x: (state + x.sum(), x), carry="state", batch="x", **options)


def hosted(**read):
    value = np.ones(10_000, np.float32)
    return sc.Variables(value, placement=sc.OnHost(), read=sc.Read(**read), name="moments")


def placed(mesh, *spec, size=8):
    return jax.device_put(np.ones(size, np.float32), NamedSharding(mesh, P(*spec)))


# ---- the option ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 1.5, "1MB", True, float("inf")])
def test_a_bound_is_a_number_of_bytes(eight, bad):
    with pytest.raises(sc.OptionError, match="max_step_bytes"):
        sc.Session(eight, max_step_bytes=bad)


def test_without_a_bound_nothing_is_checked(eight):
    with sc.Session(eight, max_step_bytes=None):
        adder()(placed(eight), np.ones((8, 100_000), np.float32))


# ---- steps without variables -----------------------------------------------------------------


def test_a_call_that_needs_more_raises_and_names_the_dearest(eight):
    step = sc.step(lambda a, b, c: a.sum() + b.sum() + c, batch=("a", "b", "c"))
    args = (np.ones((8, 500), np.float32), np.ones((8, 7), np.float32), np.float32(1))
    with sc.Session(eight, max_step_bytes=1_000):
        needed = step.explain(*args).moved_bytes
        before = live()
        with pytest.raises(sc.TransferBudgetError) as raised:
            step(*args)
        assert live() == before
    error = raised.value
    assert error.needed_bytes == needed == 8 * 500 * 4 + 8 * 7 * 4 + 8 * 4
    assert error.max_step_bytes == 1_000
    assert error.where == "a: 16000 bytes, b: 224 bytes, c: 32 bytes"
    assert "1000 bytes" in str(error) and "16256 bytes" in str(error)
    assert step.stats().traces == 0


def test_exactly_the_bound_is_allowed(eight):
    step = sc.step(lambda x: x.sum(), batch="x")
    x = np.ones((8, 100), np.float32)
    with sc.Session(eight, max_step_bytes=x.nbytes):
        assert float(step(x)) == 800
    with sc.Session(eight, max_step_bytes=x.nbytes - 1):
        with pytest.raises(sc.TransferBudgetError):
            step(x)


def test_bytes_count_on_every_device_that_they_reach(eight):
    step = sc.step(lambda state, x: (state, x), carry="state", batch="x")
    state, x = np.ones(100, np.float32), np.ones(8, np.float32)
    needed = 8 * 400 + 32  # The carry is replicated, the batch split.
    with sc.Session(eight, max_step_bytes=needed - 1):
        with pytest.raises(sc.TransferBudgetError) as raised:
            step(state, x)
        assert raised.value.needed_bytes == needed
    with sc.Session(eight, max_step_bytes=needed):
        step(state, x)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("named", [True, False], ids=["NamedSharding", "PartitionSpec"])
@pytest.mark.parametrize(
    ("value", "spec", "copies"),
    [
        (lambda: np.ones(80, np.float32), P(), 8),
        (lambda: np.ones(80, np.float32), P("data"), 1),
        (lambda: jnp.ones(80), P(), 7),
        (lambda: jnp.ones(80), P("data"), 7 / 8),
        pytest.param(
            *(lambda: jax.device_put(np.ones(80, np.float32), jax.devices()[3]), P(), 7),
            marks=pytest.mark.skipif(not jaxcompat.PRIVATE_API, reason="JAX's stages refuse it"),
        ),
    ],
    ids=["host", "host, split", "uncommitted", "uncommitted, split", "on another device"],
)
def test_bytes_count_where_the_steps_own_in_shardings_send_them(eight, value, spec, copies, named):
    asked = NamedSharding(eight, spec) if named else spec
    step = sc.step(lambda x, y: x.sum() + y.sum(), in_shardings=(asked, None))
    there, needed = placed(eight), int(320 * copies)
    with sc.Session(eight, max_step_bytes=needed - 1):
        explained = step.explain(value(), there)
        assert explained.moved_bytes == needed
        assert "the step's in_shardings" in explained.arguments[0].why
        with pytest.raises(sc.TransferBudgetError) as raised:
            step(value(), there)
        assert raised.value.needed_bytes == needed
        assert step.stats().traces == 0
    with sc.Session(eight, max_step_bytes=needed):
        assert float(step(value(), there)) == 88


def test_what_is_where_the_steps_own_in_shardings_ask_for_it_does_not_move(eight):
    step = sc.step(lambda state, x: (state + x, x), carry="state", in_shardings=(None, P("data")))
    with sc.Session(eight, max_step_bytes=0):
        state = sc.Variables(np.ones(8, np.float32))
        for _ in range(2):
            state, _ = step(state, placed(eight, "data"))
        np.testing.assert_array_equal(state.value, 3)
        with pytest.raises(sc.TransferBudgetError) as raised:
            step(state, np.ones(8, np.float32))
        assert raised.value.needed_bytes == 32 and raised.value.where == "x: 32 bytes"


def test_in_shardings_that_do_not_fit_are_for_jax_to_refuse(eight):
    step = sc.step(lambda x: x, in_shardings=P("data"))
    with sc.Session(eight, max_step_bytes=10**9), pytest.raises(ValueError, match="evenly divide"):
        step(np.ones(9, np.float32))


def test_arrays_on_one_device_have_the_others_to_reach(eight):
    step = sc.step(lambda x: x, batch="x")
    x = jnp.ones(80)
    with sc.Session(eight, max_step_bytes=0):
        with pytest.raises(sc.TransferBudgetError) as raised:
            step(x)
        assert raised.value.needed_bytes == 7 * 40


def test_nothing_is_donated_by_a_call_that_is_refused(eight):
    step = adder()
    state = placed(eight)
    with sc.Session(eight, max_step_bytes=10):
        with pytest.raises(sc.TransferBudgetError):
            step(state, np.ones((8, 8), np.float32))
        np.testing.assert_array_equal(state, 1)
        state, _ = step(state, placed(eight, "data"))
    np.testing.assert_array_equal(state, 9)


def test_hits_are_checked_too(eight):
    """Also after the program is there, and for calls just like one that was allowed."""
    step = adder()
    state, near, far = placed(eight), placed(eight, "data"), np.ones(8, np.float32)
    with sc.Session(eight, max_step_bytes=31):
        state, _ = step(state, near)
        for _ in range(3):
            with pytest.raises(sc.TransferBudgetError):
                step(state, far)
            state, _ = step(state, near)
    assert step.stats().misses == 1
    np.testing.assert_array_equal(state, 1 + 4 * 8)


def test_a_call_that_only_looks_like_one_that_was_allowed(eight):
    """To the dispatcher a numpy array is like an array on one device, but it has further to go."""
    step = sc.step(lambda x: x.sum(), batch="x")
    with sc.Session(eight, max_step_bytes=7 * 4):
        for _ in range(3):
            assert float(step(jnp.ones(8))) == 8
        with pytest.raises(sc.TransferBudgetError) as raised:
            step(np.ones(8, np.float32))
    assert raised.value.needed_bytes == 8 * 4


def test_a_bound_holds_in_its_session_only(eight):
    """The dispatcher's fast path of one session does not serve the other."""
    step = sc.step(lambda x: x.sum())
    x = np.ones(8, np.float32)
    free, bound = sc.Session(eight), sc.Session(eight, max_step_bytes=0)
    for _ in range(3):
        with free:
            assert float(step(x)) == 8
        with bound:
            with pytest.raises(sc.TransferBudgetError):
                step(x)
    assert float(step(x)) == 8


def test_a_step_bound_to_a_session_has_its_bound(eight):
    step = sc.Session(eight, max_step_bytes=0).step(lambda x: x.sum())
    for _ in range(2):
        with pytest.raises(sc.TransferBudgetError):
            step(np.ones(8, np.float32))
        step(placed(eight))


def test_zero_forbids_arguments_from_the_host(eight):
    step = sc.step(lambda x: x.sum())
    with sc.Session(eight, max_step_bytes=0):
        for host in (np.ones(8, np.float32), np.float32(1), 1.0, [1, 2], {"x": np.ones(8)}):
            with pytest.raises(sc.TransferBudgetError):
                sc.step(lambda x: x)(host)
        for _ in range(3):
            assert float(step(placed(eight, "data"))) == 8
        step(np.ones((0, 8), np.float32)), step(placed(eight, size=0))


def test_static_arguments_do_not_move(eight):
    step = sc.step(lambda x, n: x * n, static_argnames="n")
    with sc.Session(eight, max_step_bytes=0):
        np.testing.assert_array_equal(step(placed(eight), n=3), 3)
        np.testing.assert_array_equal(step(placed(eight), 3), 3)


def test_to_warm_and_to_trace_move_nothing_and_are_allowed(eight):
    step = sc.step(lambda x: x.sum())
    with sc.Session(eight, max_step_bytes=0):
        step.warm(np.ones(8, np.float32))
        step.lower(np.ones(8, np.float32))
        assert step.explain(np.ones(8, np.float32)).hit
        assert step.stats().misses == 1


def test_a_step_inside_another_transformation_places_nothing(eight):
    step = sc.step(lambda x: (x**2).sum())
    with sc.Session(eight, max_step_bytes=0):
        np.testing.assert_array_equal(jax.grad(step)(placed(eight)), 2)


def test_an_invalid_argument_is_for_jax_to_refuse(eight):
    with sc.Session(eight, max_step_bytes=10**9):
        for step, state in ((adder(), placed(eight)), (adder(), sc.Variables(np.ones(8)))):
            with pytest.raises(TypeError, match="str"):
                step(state, "batch")


# ---- steps with variables --------------------------------------------------------------------


def test_a_read_that_needs_more_raises_before_it_moves(eight, moved):
    step = adder()
    with sc.Session(eight):
        state = hosted()
        step(state, np.ones(8, np.float32))
    needed = 8 * V + V + 32  # Gathered, written back, and the batch.
    with sc.Session(eight, max_step_bytes=needed - 1):
        x = np.ones(8, np.float32)
        assert step.explain(state, x).moved_bytes == needed
        before, events = live(), len(moved)
        for _ in range(2):
            with pytest.raises(sc.TransferBudgetError) as raised:
                step(state, x)
        assert raised.value.needed_bytes == needed
        names = f"moments (gather): {8 * V} bytes, moments (scatter): {V} bytes, x: 32 bytes"
        assert raised.value.where == names
        assert live() == before and len(moved) == events and state.version == 1
        np.testing.assert_array_equal(state.value, 9)
    with sc.Session(eight, max_step_bytes=needed):
        for _ in range(2):
            step(state, x)
        assert state.version == 3
    assert step.stats().moved_bytes == 3 * (needed - 32)


def test_zero_forbids_reads_from_the_host_and_lets_resident_variables_run(eight, moved):
    step = adder()
    with sc.Session(eight, max_step_bytes=0):
        resident, away = sc.Variables(np.zeros(8, np.float32)), hosted()
        near = placed(eight, "data")
        for number in range(3):
            step(resident, near)
            np.testing.assert_array_equal(resident.value, 8 * (number + 1))
            with pytest.raises(sc.TransferBudgetError):
                step(away, near)
            with pytest.raises(sc.TransferBudgetError):
                step(resident, np.ones(8, np.float32))
        assert (resident.version, away.version) == (3, 0)
        assert step.stats().moved_bytes == 0 and not moved


@pytest.mark.parametrize("placement", [sc.Replicated(), sc.OnHost()], ids=str)
def test_a_bound_on_variables_holds_in_its_session_only(eight, placement):
    """Also where a call is just like the one before it, in another session."""
    step = adder()
    free, bound = sc.Session(eight), sc.Session(eight, max_step_bytes=0)
    with free:
        state = sc.Variables(np.zeros(8, np.float32), placement=placement)
    for number in range(3):
        for _ in range(2):
            with free:
                step(state, np.ones(8, np.float32))
            with bound:
                with pytest.raises(sc.TransferBudgetError):
                    step(state, np.ones(8, np.float32))
        assert state.version == 2 * (number + 1)
    np.testing.assert_array_equal(state.value, 6 * 8)


def test_a_copy_that_is_kept_costs_nothing_more(eight, moved):
    look = sc.step(lambda state: state.sum())
    with sc.Session(eight):
        kept = hosted(cache="device")
        look(kept)
    with sc.Session(eight, max_step_bytes=0):
        assert float(look(kept)) == 10_000
    with sc.Session(eight, max_step_bytes=V):
        kept.assign(np.zeros(10_000, np.float32))
        with pytest.raises(sc.TransferBudgetError):  # No device has had what was assigned.
            look(kept)
    with sc.Session(eight, max_step_bytes=8 * V):
        assert float(look(kept)) == 0
    with sc.Session(eight, max_step_bytes=0):
        assert float(look(kept)) == 0
    assert [event.step for event in moved] == ["<lambda>", "moments", "<lambda>"]


def test_two_arguments_that_share_a_transfer_count_once(eight):
    look = sc.step(lambda a, b: a.sum() + b.sum())
    with sc.Session(eight, max_step_bytes=8 * V):
        state = hosted()
        assert float(look(state, state)) == 20_000
        with pytest.raises(sc.TransferBudgetError) as raised:
            look(state, hosted())
        assert raised.value.needed_bytes == 16 * V


def test_variables_do_not_hide_what_lies_beside_them(eight, moved):
    """Nor does a plain leaf whose path looks like theirs."""
    step = sc.step(lambda state: state, carry="state")
    with sc.Session(eight, max_step_bytes=8 * V + V):
        state = {"v": hosted(), "buffers": {"0": np.ones(100_000, np.float32)}}
        assert step.explain(state).moved_bytes == 9 * V + 8 * 400_000
        before = live()
        with pytest.raises(sc.TransferBudgetError) as raised:
            step(state)
        assert raised.value.needed_bytes == 9 * V + 8 * 400_000
        assert live() == before and not moved and state["v"].version == 0


def test_variables_are_counted_where_other_arguments_cannot_be(eight, moved):
    """A mutable reference goes to JAX as it is."""
    step = sc.step(lambda state, ref: (state + 1, None), carry="state")
    with sc.Session(eight, max_step_bytes=V):
        state, ref = hosted(), jax.new_ref(jnp.ones(3))
        with pytest.raises(sc.TransferBudgetError) as raised:
            step(state, ref)
        assert raised.value.needed_bytes == 9 * V
        assert not moved and state.version == 0


def test_without_jit_the_bound_holds_for_variables(eight):
    with sc.Session(eight, max_step_bytes=V), jax.disable_jit():
        state = hosted()
        with pytest.raises(sc.TransferBudgetError):
            adder()(state, placed(eight, "data"))
        assert state.version == 0


# ---- writes outside of steps -----------------------------------------------------------------


def tree(scale=1.0):
    return {"w": np.full(10_000, scale, np.float32), "b": np.full(3, scale, np.float32)}


WRITES = {
    "assign": sc.Write(),
    "add": sc.Write(mode="add"),
    "apply": sc.Write(mode="apply", optimizer=optax.adam(1e-3)),
}
WRITTEN = {
    "on the host": sc.OnHost(),
    "on the host, computed there": sc.OnHost(update="host"),
    "on the devices": sc.Replicated(),
}


@pytest.mark.sample
@pytest.mark.parametrize("mesh", [True, False], ids=["eight", "no mesh"])
@pytest.mark.parametrize("placement", WRITTEN)
@pytest.mark.parametrize("write", WRITES)
def test_a_push_is_told_of_and_not_judged(placement, write, mesh, eight, moved):
    place = {"mesh": eight} if mesh else {}
    update = jax.tree.map(jnp.asarray, tree(0.5))
    with sc.Session(**place):
        variables = sc.Variables(
            tree(), placement=WRITTEN[placement], write=WRITES[write], name="moments"
        )
        variables.push(update)  # Makes the optimizer's state.
    moved.clear()
    with sc.Session(**place, max_step_bytes=0):  # Of steps.
        variables.push(update)
    total = sum(size for event in moved for _, size in event.link_bytes)
    assert (total > 0) is (placement == "on the host" or "computed" in placement)
    assert all(event.step == "moments" for event in moved) and len(moved) == (total > 0)


def test_a_push_that_only_adds_up_moves_nothing(eight, moved):
    write = sc.Write(mode="add", every=3)
    with sc.Session(eight):
        variables = sc.Variables(tree(), placement=sc.OnHost(), write=write, name="moments")
        for _ in range(2):
            variables.push(tree())
        assert not moved and variables.version == 0
        variables.push(tree())
    assert len(moved) == 1 and float(variables.value["b"][0]) == 4


def test_the_first_push_of_an_optimizer_counts_its_state(eight, moved):
    write = sc.Write(mode="apply", optimizer=optax.adam(1e-3))
    with sc.Session(eight):
        variables = sc.Variables(tree(), placement=sc.OnHost(), write=write, name="moments")
        variables.push(tree())
        variables.push(tree())
    first, second = (sum(size for _, size in event.link_bytes) for event in moved)
    assert first > second > 0


def test_an_assignment_is_told_of(eight, moved):
    with sc.Session(eight):
        state = hosted()
        state.assign(np.zeros(10_000, np.float32))
    assert moved == [Moved("moments", ((HOST_LINK, V),))]


def test_restoring_is_told_of(eight, moved, tmp_path):
    with sc.Session(eight):
        write = sc.Write(mode="apply", optimizer=optax.sgd(0.1, momentum=0.9))
        value = np.ones(10_000, np.float32)
        state = sc.Variables(value, placement=sc.OnHost(), write=write, name="moments")
        state.push(value)
        sc.save(tmp_path, value=state)
        kept = state.value
        state.assign(np.zeros(10_000, np.float32))
    moved.clear()
    with sc.Session(eight):
        sc.restore(tmp_path, value=state)
    assert moved == [Moved("moments", ((HOST_LINK, V),))] * 2
    np.testing.assert_array_equal(kept, state.value)
