"""The check of a draft tree: a walk by state equality."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spot_jax.state import State, Verdict


def walk(
    nodes: State,
    valid: Bool[Array, "B N"],
    successors: State,
    final: Bool[Array, "B N"],
    root: Int[Array, " B"],
) -> Verdict:
    """Follows the plain decoder through the drafted states.

    From the root, while the state that the plain decoder reaches next is a node, goes there. Every
    slot visited is one move of the plain decoder, so the result is its own path, whatever was
    drafted. There is no acceptance probability anywhere: noise shared by drafter and target is
    right only under equality.

    Args:
      nodes: states that were evaluated, `[B, N, L]`.
      valid: slots that hold a node; only these can be reached.
      successors: the plain decoder's next state at each slot, `[B, N, L]`.
      final: slots whose successor ends the row; the walk goes no further.
      root: slot to start from, always visited.
    """
    return Verdict(*jax.vmap(_walk_row)(nodes, valid, successors, final, root))


def _walk_row(nodes, valid, successors, final, root):
    num_slots = valid.shape[0]
    same = (successors.tokens[:, None] == nodes.tokens[None]) & (
        successors.masked[:, None] == nodes.masked[None]
    )
    reaches = jnp.all(same, axis=-1) & valid[None]
    target = jnp.argmax(reaches, axis=-1)
    onward = jnp.any(reaches, axis=-1) & ~final

    def move(step, carry):
        order, here, walking = carry
        walking = walking & onward[here]
        here = jnp.where(walking, target[here], here)
        order = order.at[here].set(jnp.where(walking, step, order[here]))
        return order, here, walking

    order = jnp.full(num_slots, -1).at[root].set(0)
    order, last, _ = jax.lax.fori_loop(1, num_slots, move, (order, root, jnp.array(True)))
    return order, last, jnp.max(order) + 1
