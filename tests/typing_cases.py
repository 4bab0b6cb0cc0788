"""What a type checker must say of the public API. Checked, never run."""

from typing import assert_type

import jax

import stepcache as sc


@sc.step
def plain(x: jax.Array, n: int = 2) -> jax.Array:
    return x * n


@sc.step(carry="state", batch=("x",), static_argnames=("n",))
def carried(
    state: dict[str, jax.Array], n: int, x: float = 0.0
) -> tuple[dict[str, jax.Array], jax.Array]:
    return state, state["x"]


def check(x: jax.Array, session: sc.Session, state: dict[str, jax.Array]) -> None:
    assert_type(plain(x), jax.Array)
    assert_type(plain(x, n=3), jax.Array)
    assert_type(carried(state, 3), tuple[dict[str, jax.Array], jax.Array])
    assert_type(plain.stats(), sc.StepStats)
    assert_type(plain.last_miss, sc.Miss | None)
    assert_type(plain.explain(x), sc.Explanation)
    assert_type(plain.warm(x), None)
    assert_type(plain.lower(x), jax.stages.Lowered)
    assert_type(sc.current_session(), sc.Session)
    assert_type(session.cache.info(), sc.CacheInfo)
    assert_type(sc.DeploymentConfig(2).caching_device(), sc.Read)
    plain("text")  # pyright: ignore[reportArgumentType]
    plain(x, m=3)  # pyright: ignore[reportCallIssue]
    sc.Session(on_miss="explode")  # pyright: ignore[reportArgumentType]
    with sc.no_recompile(), session as entered:
        assert_type(entered, sc.Session)
