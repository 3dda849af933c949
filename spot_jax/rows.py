"""Per-row gathers and scatters: each row reads and writes at its own place."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def pick_slot(x: Array, slot: Int[Array, " B"]) -> Array:
    """`x[b, slot[b]]` for every row."""
    index = slot.reshape((-1,) + (1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, index, axis=1)[:, 0]


def take_block(x: Array, start: Int[Array, " B"], length: int) -> Array:
    """The block `x[b, start[b] : start[b] + length]` of every row."""
    return jax.vmap(lambda row, s: jax.lax.dynamic_slice_in_dim(row, s, length))(x, start)


def put_block(x: Array, block: Array, start: Int[Array, " B"]) -> Array:
    """Writes a block back."""
    return jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(
        x, block, start, 0
    )
