"""A Gaussian process by Cholesky, and what else calls LAPACK on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve

import stepcache as sc


def negative_log_likelihood(params, x, y):
    distances = jnp.sum((x[:, None] - x[None]) ** 2, axis=-1)
    kernel = jnp.exp(params["amplitude"] - distances * jnp.exp(-params["length"]))
    factor = jnp.linalg.cholesky(kernel + 0.1 * jnp.eye(len(x)))
    return 0.5 * y @ cho_solve((factor, True), y) + jnp.log(jnp.diag(factor)).sum()


@sc.step
def fit(params, x, y):
    loss, grads = jax.value_and_grad(negative_log_likelihood)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


@sc.step
def spectra(matrix):
    symmetric = matrix @ matrix.T
    orthogonal, triangular = jnp.linalg.qr(matrix)
    return {
        "eigenvalues": jnp.linalg.eigvalsh(symmetric),
        "any eigenvalues": jnp.abs(jnp.linalg.eigvals(matrix)).sum(),
        "singular values": jnp.linalg.svd(matrix, compute_uv=False),
        "solution": jnp.linalg.solve(symmetric + jnp.eye(len(matrix)), orthogonal @ triangular),
        "schur": jnp.trace(jax.scipy.linalg.schur(matrix)[0]),
    }


rng = np.random.default_rng(0)
x = rng.uniform(-2, 2, (12, 1)).astype(np.float32)
params = {"amplitude": jnp.zeros(()), "length": jnp.zeros(())}
for step in range(3):
    params, loss = fit(params, x, np.sin(3 * x[:, 0]))
    print(f"step {step}: loss {loss:.5f}")
for name, value in spectra(rng.normal(size=(4, 4)).astype(np.float32)).items():
    print(name, np.round(np.asarray(value), 3).tolist())
