"""Noise as a pure function of coordinates; the only module that folds keys.

The noise of a token depends on the request's key, the absolute position, the number of positions
already committed in the block, and the token id: nothing else. It is therefore fresh at every
step, the same for every node that is the same state, and independent of batch, slot, budget,
vocabulary chunk and mesh.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend import random as jex_random
from jaxtyping import Array, Float, Int, Key, UInt32

# Streams of one request: token noise and the order of random commits never share a draw.
_TOKEN_STREAM, _ORDER_STREAM = 0, 1


def request_keys(seed: int, num_requests: int, first: int = 0) -> Key[Array, " B"]:
    """Keys of requests `first, first + 1, ...`; a request keeps its key in any batch."""
    root = jax.random.key(seed)
    return jax.vmap(lambda i: jax.random.fold_in(root, i))(first + jnp.arange(num_requests))


def _fold(keys, *coordinates) -> Key[Array, "..."]:
    """Folds coordinates, each broadcastable to the shape of the result, into keys."""
    shape = jnp.broadcast_shapes(keys.shape, *(c.shape for c in coordinates))
    flat = jnp.broadcast_to(keys, shape).reshape(-1)
    for coordinate in coordinates:
        flat = jax.vmap(jax.random.fold_in)(flat, jnp.broadcast_to(coordinate, shape).reshape(-1))
    return flat.reshape(shape)


def _exponential(high: UInt32[Array, "*n"], low: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    """Unit exponentials from 64 random bits, precise in the small tail that decides an argmax."""
    scale = jnp.float32(2.0**-32)
    uniform = (high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * scale) * scale
    # The largest float32 below 1: 32 bits round up to 1, whose exponential would be infinite.
    return -jnp.log1p(-jnp.minimum(uniform, jnp.float32(1.0 - 2.0**-24)))


def token_gumbel(
    keys: Key[Array, " B"],
    positions: Int[Array, "B *n L"],
    counts: Int[Array, " B *n"],
    token_ids: Int[Array, "#B *#n #L T"],
) -> Float[Array, "B *n L T"]:
    """Standard Gumbel noise of given tokens at given positions.

    Each token's draw is addressed by its id, so any subset or chunk of the vocabulary, in any
    order, gives the draws that the whole would. float32, finite, at most about 45.

    Args:
      keys: typed threefry key of each row.
      positions: absolute positions.
      counts: positions committed in the block, at each state.
      token_ids: tokens wanted; leading axes broadcast.
    """
    lead = keys.reshape(keys.shape + (1,) * (positions.ndim - 1))
    stream = jnp.full((1,) * positions.ndim, _TOKEN_STREAM)
    folded = _fold(lead, stream, positions, counts[..., None])
    data = jax.random.key_data(folded).reshape(-1, 2)
    shape = (*positions.shape, token_ids.shape[-1])
    wanted = jnp.broadcast_to(token_ids, shape).reshape(-1, shape[-1]).astype(jnp.uint32)

    def draw(key_data, ids):
        bits = jex_random.threefry_2x32(
            (key_data[0], key_data[1]), jnp.concatenate([ids, jnp.zeros_like(ids)])
        )
        high, low = jnp.split(bits, 2)
        return -jnp.log(_exponential(high, low))

    return jax.vmap(draw)(data, wanted).reshape(shape)


def order_uniform(
    keys: Key[Array, " B"], positions: Int[Array, "B *n L"], counts: Int[Array, " B *n"]
) -> Float[Array, "B *n L"]:
    """Uniform draws that order the positions under random commit rules."""
    lead = keys.reshape(keys.shape + (1,) * (positions.ndim - 1))
    stream = jnp.full((1,) * positions.ndim, _ORDER_STREAM)
    folded = _fold(lead, stream, positions, counts[..., None])
    return jax.vmap(jax.random.uniform)(folded.reshape(-1)).reshape(positions.shape)


def order_draws(
    keys: Key[Array, " B"], positions: Int[Array, "B *n L"], counts: Int[Array, " B *n"]
) -> Callable[..., Float[Array, "B *n L"]]:
    """`order_uniform` for commit rules: fresh at every step, or with `fixed=True` one draw a
    position, the same at each step."""

    def draw(fixed: bool = False):
        return order_uniform(keys, positions, jnp.zeros_like(counts) if fixed else counts)

    return draw
