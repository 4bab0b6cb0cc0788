"""Models and optimizers that steps make and return, as in flax's guides to sharded training."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache import nnx as snnx


def squared(x):
    return x * x


class Block(nnx.Module):
    def __init__(self, width, activation, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.activation = activation

    def __call__(self, x):
        return self.activation(self.dropout(self.norm(self.linear(x))))


class Network(nnx.Module):
    def __init__(self, width, rngs):
        by_axis = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.first = nnx.Linear(3, width, kernel_init=by_axis, rngs=rngs)
        self.blocks = nnx.List([Block(width, each, rngs) for each in (nnx.relu, squared)])
        self.last = nnx.Linear(width, 1, rngs=rngs)
        self.limit = scaled_by(0.5)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.limit(self.last(x))


def scaled_by(factor):
    return lambda x: factor * x


@snnx.step
def create_sharded_model():
    model = Network(4, nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model


def optimizer_of(rate):
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 10, 100)
    decay = optax.add_decayed_weights(1e-4, mask=lambda tree: jax.tree.map(jnp.ndim, tree))
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        decay,
        optax.scale_by_schedule(schedule),
    )


@snnx.step
def create_both():
    model = Network(4, nnx.Rngs(1))
    return model, nnx.Optimizer(model, optimizer_of(1e-2), wrt=nnx.Param)


@sc.step
def create_split():
    return nnx.split(Network(4, nnx.Rngs(2)))


@sc.step
def create_tree():
    return {"model": Network(4, nnx.Rngs(3))}


@sc.step
def create_state(key):
    params = {"w": jax.random.normal(key, (3, 1))}
    return TrainState.create(apply_fn=apply, params=params, tx=optax.adamw(1e-3))


def apply(params, x):
    return x @ params["w"]


@snnx.step
def train(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def main():
    x, y = jnp.ones((2, 3)), jnp.ones((2, 1))
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        sharded = create_sharded_model()
        assert sharded.first.kernel.sharding.spec == P(None, "model")
        model, optimizer = create_both()
        graphdef, state = create_split()
        split, tree = nnx.merge(graphdef, state), create_tree()["model"]
        for made in (model, split, tree, sharded):
            assert made.blocks[1].activation is squared and made.blocks[0].activation is nnx.relu
            assert made.limit(2.0) == 1.0
            made.eval()
            assert made(x).shape == (2, 1)
            made.train()
        losses = [float(train(model, optimizer, x, y)) for _ in range(3)]
        assert losses[0] != losses[2], losses
    state = create_state(jax.random.key(0))
    assert state.apply_fn is apply
    gradients = jax.grad(lambda params: state.apply_fn(params, x).sum())(state.params)
    state = state.apply_gradients(grads=gradients)
    print("loss", *(f"{each:.5f}" for each in losses), "step", state.step)


if __name__ == "__main__":
    main()
