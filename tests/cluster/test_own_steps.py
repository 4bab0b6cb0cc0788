"""Steps that each process of a pod calls for itself, without a session."""

import pytest

from tests.cluster.pods import run_pod, succeeded

ALONE = """
@sc.step
def scale(x, by):
    return x * by
@sc.step(out_shardings=NamedSharding(mesh, P("data")))
def numbers(first):
    return first + jnp.arange(4.0)
@sc.step(static_argnames="size")
def zeros(size):
    return {"w": jnp.zeros(size)}
# No session, and no array that is placed: each process calls them for itself, on its own device.
own = jax.local_devices()[0]
for x in (np.ones(3, np.float32), jnp.ones(3), jax.device_put(np.ones(3, np.float32), own)):
    out = scale(x, 2.0 + RANK)
    say("scaled", float(out[0]), out.devices() == {own})
say("zeros", float(zeros(size=3)["w"].sum()))
total = numbers(1.0)  # Over the devices of all processes, in their order.
say("part", *np.asarray(total.addressable_shards[0].data))
say("traces", scale.stats().traces, zeros.stats().traces, numbers.stats().traces)
say("compiles", scale.stats().compiles, zeros.stats().compiles, numbers.stats().compiles)
"""


@pytest.mark.slow
def test_steps_that_each_process_calls_for_itself(tmp_path):
    """They share a directory. Each process loads the program onto its own device."""
    for run in range(3):
        (tmp_path / str(run)).mkdir()
        ranks = succeeded(run_pod(tmp_path / str(run), ALONE, cache=tmp_path / "cache"))
        for number, rank in enumerate(ranks):
            assert rank.said("scaled") == [f"{2.0 + number} True"] * 3, (run, rank.output)
            assert rank.said("zeros") == ["0.0"]
            assert rank.said("part") == [["1.0 2.0"], ["3.0 4.0"]][number], (run, rank.output)
            if run:
                assert rank.said("compiles") == ["0 0 0"], (run, rank.output)
