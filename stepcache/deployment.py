"""`DeploymentConfig`: TF-slim's `model_deploy`, on a mesh, placements and policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from stepcache.errors import OptionError, PlacementError
from stepcache.session import Session
from stepcache.step import step
from stepcache.variables.policy import OnHost, Placement, Read, Replicated, Write
from stepcache.variables.variables import Variables

if TYPE_CHECKING:
    from stepcache.serving.connection import Connection

AXIS = "clones"
_COUNTS = {"num_clones": 1, "replica_id": 0, "num_replicas": 1, "num_ps_tasks": 0}


class Clone(NamedTuple):
    """Results of one clone.

    Attributes:
        outputs: what `model_fn` returned after the loss.
        loss: the loss of this clone.
        scope: its `DeploymentConfig.clone_scope`.
        device: its `DeploymentConfig.clone_device`.
    """

    outputs: Any
    loss: jax.Array
    scope: str
    device: Any


@dataclass(frozen=True)
class DeploymentConfig:
    """Places the clones of a model, its variables and its optimizer, with TF-slim's options.

        config = sc.DeploymentConfig(num_clones=2)
        model = config.deploy(loss_fn, params, optimizer=optax.sgd(0.1))
        for batch in batches:
            total_loss, outputs = model.train_op(batch)

    Options, methods and checks are those of slim's `model_deploy`, so that you can move a program
    piece by piece. New programs do not need this class: *Coming from TF-slim* in the documentation
    says what to write instead.

    Attributes:
        num_clones: number of clones in this process. Each computes its part of a batch on its own
            device.
        clone_on_cpu: whether all clones are on the first CPU device of this process.
        replica_id: number of this process among the replicas.
        num_replicas: number of processes, each with its clones, that share the variables.
        num_ps_tasks: number of hosts that serve the variables; 0 keeps them in this process.
        worker_job_name: name of the replicas in `slim_devices`.
        ps_job_name: name of the hosts in `slim_devices`.

    Raises:
        OptionError: several replicas without a host of variables; a used job without a name;
            `replica_id` not below `num_replicas`; a count that is not an int, or is too small.
    """

    num_clones: int = 1
    clone_on_cpu: bool = False
    replica_id: int = 0
    num_replicas: int = 1
    num_ps_tasks: int = 0
    worker_job_name: str = "worker"
    ps_job_name: str = "ps"

    def __post_init__(self):
        for name, least in _COUNTS.items():
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < least:
                raise _refused(f"{name} counts from {least}", f"an int ≥ {least}", given)
        if self.num_replicas > 1 and self.num_ps_tasks < 1:
            what = "several replicas share variables that another process holds"
            raise _refused(what, "num_ps_tasks ≥ 1", self.num_ps_tasks)
        for name in ("worker_job_name", "ps_job_name"):
            if self.num_ps_tasks and not getattr(self, name):
                raise _refused(f"{name} is missing", "a name", getattr(self, name))
        if self.replica_id >= self.num_replicas:
            expected = f"less than num_replicas={self.num_replicas}"
            raise _refused("replica_id counts the replicas from 0", expected, self.replica_id)

    @property
    def worker_device(self) -> str:
        """Slim's name of the job of the replicas; empty without hosts of variables."""
        return f"/job:{self.worker_job_name}" if self.num_ps_tasks else ""

    @property
    def ps_device(self) -> str:
        """Slim's name of the job of the hosts of variables; empty without them."""
        return f"/job:{self.ps_job_name}" if self.num_ps_tasks else ""

    @property
    def mesh(self) -> Mesh:
        """The devices of the clones, along the axis "clones"; a single one with `clone_on_cpu`."""
        devices = list(dict.fromkeys(map(self.clone_device, range(self.num_clones))))
        return jax.make_mesh((len(devices),), (AXIS,), (AxisType.Auto,), devices=devices)

    def session(self, **options: Any) -> Session:
        """Makes a `Session` with these options over `mesh`. It splits batches over the clones."""
        return Session(self.mesh, data_axis=AXIS, **options)

    def clone_device(self, clone_index: int) -> Any:
        """Returns the device of a clone.

        Raises:
            OptionError: there is no such clone.
            PlacementError: this process has fewer devices than clones.
        """
        self.clone_scope(clone_index)
        if self.clone_on_cpu:
            return self.inputs_device()
        if (count := jax.local_device_count()) < self.num_clones:
            raise PlacementError(
                "each clone needs a device of its own",
                where="DeploymentConfig(num_clones=...)",
                expected=f"at most {count}, the number of devices of this process",
                got=str(self.num_clones),
                hint="clone_on_cpu=True has all clones on one device",
            )
        return jax.local_devices()[clone_index]

    def clone_scope(self, clone_index: int) -> str:
        """Returns the name of a clone, such as `clone_1`; an empty string if there is only one.

        Raises:
            OptionError: there is no such clone.
        """
        if not 0 <= clone_index < self.num_clones:
            expected = f"less than num_clones={self.num_clones}"
            raise _refused("clone_index counts the clones from 0", expected, clone_index)
        return f"clone_{clone_index}" if self.num_clones > 1 else ""

    def inputs_device(self) -> Any:
        """Returns the device for inputs: the first CPU device of this process."""
        return jax.local_devices(backend="cpu")[0]

    def optimizer_device(self) -> Any:
        """Returns the device for your own optimizer: the first CPU device of this process.

        The optimizer of `deploy` runs on the CPU of the process that holds the variables.
        """
        return self.inputs_device()

    def variables_device(self) -> Placement:
        """Returns the placement of the variables: host memory, where the optimizer runs.

        With hosts of variables, the placement of the copies that the clones read.
        """
        return Replicated() if self.num_ps_tasks else OnHost(update="host")

    def caching_device(self) -> Read:
        """Returns how the clones read the variables: at each step, which is slim's None.

        With hosts of variables, clones keep a copy that is valid while its version is the newest.
        Slim's copy was valid for one `session.run`.
        """
        return Read(cache="device") if self.num_ps_tasks else Read()

    def slim_devices(self) -> dict[str, str]:
        """Returns slim's device strings, by the methods that returned them there."""
        cpu = "/device:CPU:0"
        names = {
            f"clone_device({i})": self.worker_device
            + (cpu if self.clone_on_cpu else f"/device:GPU:{i}")
            for i in range(self.num_clones)
        }
        names |= dict.fromkeys(("optimizer_device()", "inputs_device()"), self.worker_device + cpu)
        return names | {"variables_device()": self.ps_device + cpu}

    def create_clones(
        self, model_fn: Callable[..., Any], variables: Any, batch: Any, **kwargs: Any
    ) -> list[Clone]:
        """Runs a model for each clone, on its part of a batch.

        Args:
            model_fn: `model_fn(variables, batch, **kwargs)` returns the loss, a scalar, or the loss
                and other outputs. `jax.lax.axis_index("clones")` is the number of the clone.
            variables: what all clones share.
            batch: a tree of arrays, whose first dimensions are split over the clones in order.
                Scalars are the same in all.
            **kwargs: the same in all clones.

        Raises:
            PlacementError: a first dimension is not divisible by the number of clones.
            OptionError: the loss is not a scalar.
        """
        losses, outputs = self._run(model_fn, variables, batch, kwargs)
        return [
            Clone(
                jax.tree.map(lambda each, i=i: each[i], outputs),
                losses[i],
                self.clone_scope(i),
                self.clone_device(i),
            )
            for i in range(self.num_clones)
        ]

    def optimize_clones(
        self,
        model_fn: Callable[..., Any],
        variables: Any,
        batch: Any,
        *,
        regularization: Callable[[Any], jax.Array] | None = None,
        **kwargs: Any,
    ) -> tuple[jax.Array, Any, Any]:
        """Computes the loss of all clones, and its gradients with respect to the variables.

        The loss is the sum of the clones' losses, each divided by the number of clones, plus the
        regularization once. The gradients are those of this loss.

        Args:
            model_fn: as in `create_clones`, as are `variables`, `batch` and `kwargs`.
            variables: what all clones share.
            batch: split over the clones.
            regularization: `regularization(variables)` is added to the loss.
            **kwargs: the same in all clones.

        Returns:
            The loss, its gradients, and the outputs of all clones along a new first dimension.
        """

        def total(variables: Any) -> tuple[jax.Array, Any]:
            return self._total(model_fn, variables, batch, regularization, kwargs)

        (loss, outputs), gradients = jax.value_and_grad(total, has_aux=True)(variables)
        return loss, gradients, outputs

    def _total(
        self, model_fn: Callable, variables: Any, batch: Any, extra: Callable | None, kwargs: dict
    ) -> tuple[jax.Array, Any]:
        losses, outputs = self._run(model_fn, variables, batch, kwargs)
        loss = jnp.sum(losses / self.num_clones)
        return loss + extra(variables) if extra else loss, outputs

    def _run(self, model_fn: Callable, variables: Any, batch: Any, kwargs: dict) -> tuple:
        """Returns the losses and the outputs of all clones, along a new first dimension."""
        parts = jax.tree_util.tree_map_with_path(self._parts, batch)
        axes = jax.tree.map(lambda each: 0 if jnp.ndim(each) else None, parts)

        def clone(part: Any) -> tuple[jax.Array, Any]:
            returned = model_fn(variables, part, **kwargs)
            loss, outputs = returned if isinstance(returned, tuple) else (returned, None)
            if jnp.shape(loss):
                raise _refused("model_fn returns the loss first", "a scalar", jnp.shape(loss))
            return jnp.asarray(loss), outputs

        mapped = {"axis_name": AXIS, "spmd_axis_name": AXIS, "axis_size": self.num_clones}
        return jax.vmap(clone, (axes,), **mapped)(parts)

    def _parts(self, keys: Any, leaf: Any) -> Any:
        """Splits the first dimension of a leaf into one part for each clone, on its device."""
        if not (shape := jnp.shape(leaf)):
            return leaf
        if shape[0] % self.num_clones:
            raise PlacementError(
                "the first dimension of a batch is split over the clones",
                where=f"batch{jax.tree_util.keystr(keys)}",
                expected=f"a multiple of num_clones={self.num_clones}",
                got=f"size {shape[0]}, in shape {list(shape)}",
            )
        parts = jnp.reshape(leaf, (self.num_clones, shape[0] // self.num_clones, *shape[1:]))
        sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return jax.lax.with_sharding_constraint(parts, sharding)

    def deploy(
        self,
        model_fn: Callable[..., Any],
        variables: Any,
        *,
        optimizer: Any = None,
        regularization: Callable[[Any], jax.Array] | None = None,
        server: Connection | None = None,
        name: str = "variables",
    ) -> DeployedModel:
        """Makes the variables, and the steps that train and evaluate the model.

        Args:
            model_fn: as in `create_clones`.
            variables: a tree of arrays: the initial value.
            optimizer: an `optax.GradientTransformation`; without one, the model is only evaluated.
            regularization: as in `optimize_clones`.
            server: a connection (`connect`) to `num_ps_tasks` hosts of variables.
            name: of the variables, the same in all replicas.

        Raises:
            OptionError: the server has another number of hosts than `num_ps_tasks`.
            PlacementError: this process has fewer devices than clones.
        """
        hosts = server.status().hosts if server is not None else 0
        if hosts != self.num_ps_tasks:
            raise OptionError(
                "num_ps_tasks is the number of hosts that serve the variables",
                where="DeploymentConfig.deploy(server=...)",
                expected=f"a connection to {self.num_ps_tasks}" if self.num_ps_tasks else "None",
                got=f"{server!r} to {hosts}" if server is not None else "None",
                hint="stepcache serve --variables DIR is one host, with --ray NAME --hosts N "
                "several; sc.connect(...) leads there",
            )
        write = Write() if optimizer is None else Write(mode="apply", optimizer=optimizer)
        how = {"placement": self.variables_device(), "read": self.caching_device(), "write": write}
        with (session := self.session()):
            if server is not None:
                made = server.variables(name, variables, **how)
            else:
                made = Variables(variables, name=name, **how)
        return DeployedModel(self, session, made, model_fn, regularization)


class DeployedModel:
    """A model with its variables, as `DeploymentConfig.deploy` makes it.

    Attributes:
        session: the session in which its steps run.
        variables: the `Variables`.
        train_step: the `Step` of `train_op`, which returns loss, gradients and outputs.
        loss_step: the `Step` of `total_loss`.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        session: Session,
        variables: Variables,
        model_fn: Callable[..., Any],
        regularization: Callable[[Any], jax.Array] | None,
    ):
        self.session, self.variables = session, variables

        def train(variables: Any, batch: Any, kwargs: dict) -> tuple:
            how = {"regularization": regularization, **kwargs}
            return config.optimize_clones(model_fn, variables, batch, **how)

        def loss(variables: Any, batch: Any, kwargs: dict) -> jax.Array:
            return config._total(model_fn, variables, batch, regularization, kwargs)[0]

        self.train_step, self.loss_step = step(train, batch="batch"), step(loss, batch="batch")

    def train_op(self, batch: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        """Trains on a batch: the optimizer applies the gradients of all clones.

        Args:
            batch: split over the clones.
            **kwargs: arrays for `model_fn`, the same in all clones.

        Returns:
            The loss, and the outputs of all clones along a new first dimension. Slim uses the
            batch normalization updates of the first clone.

        Raises:
            OptionError: the model was deployed without an optimizer.
        """
        if self.variables.write.mode != "apply":
            raise OptionError("train_op needs an optimizer", where="deploy(optimizer=...)")
        with self.session:
            loss, gradients, outputs = self.train_step(self.variables, batch, kwargs)
            self.variables.push(gradients)
        return loss, outputs

    def total_loss(self, batch: Any, **kwargs: Any) -> jax.Array:
        """Returns the mean of the clones' losses, plus the regularization, as `train_op` does."""
        with self.session:
            return self.loss_step(self.variables, batch, kwargs)


def _refused(what: str, expected: str, got: Any) -> OptionError:
    return OptionError(what, where="DeploymentConfig", expected=expected, got=repr(got))
