"""Data parallelism of the trainers: the one `jax.pmap` of the project."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# loss_fn(params, batch) -> (sum of losses, (count, other sums)); every figure is a sum, so that
# devices with different counts still give the mean over all of them.
LossFn = Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]


class TrainState(NamedTuple):
    """Everything that a training step changes. No leaf has a device axis."""

    step: jax.Array
    params: Any
    opt_state: Any


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def train_step(
    state: TrainState,
    batch: Any,
    *,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    axis_name: str | None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimiser step. With `axis_name=None` it is the single-device step.

    Args:
      state: replicated state.
      batch: this device's share.
      loss_fn: gives the sum of losses and a dict of sums with a `"count"`.
      optimizer: applied to the gradient of the mean loss over all devices.
      axis_name: mapped axis to sum over.

    Returns:
      The new state and the sums over all devices, with `"loss"` among them.
    """
    (loss, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
    sums = sums | {"loss": loss}
    if axis_name is not None:
        sums, grads = jax.lax.psum((sums, grads), axis_name)
    grads = jax.tree.map(lambda g: g / jnp.maximum(sums["count"], 1), grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), sums


def parallel_step(loss_fn: LossFn, optimizer: optax.GradientTransformation):
    """`train_step` mapped over all local devices: `(state, batch [devices, ...]) -> state, sums`.

    The state goes in and comes back without a device axis and is donated. The same program as
    `jax.jit(jax.shard_map(..., check_vma=False))`, should pmap go; under the default check_vma the
    gradients would come out multiplied by the device count.
    """

    def step(state, batch):
        return train_step(state, batch, loss_fn=loss_fn, optimizer=optimizer, axis_name="data")

    return jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=None, donate_argnums=(0,))


def split_batch(batch: Any, num_devices: int) -> Any:
    """Adds the device axis to a host batch, padding the rows with zeros where they do not divide.

    Loss functions weight rows, and a row of zeros weighs nothing.
    """

    def split(x):
        x = np.asarray(x)
        missing = -len(x) % num_devices
        x = np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) if missing else x
        return x.reshape(num_devices, -1, *x.shape[1:])

    return jax.tree.map(split, batch)
