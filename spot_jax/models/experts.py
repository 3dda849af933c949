"""Mixtures of experts: routers, and feed-forwards by grouped matmul.

Routers of Qwen3-MoE and LLaDA-MoE (softmax) and of LLaDA2 (sigmoid, grouped, with a bias that
takes part in the choice only; the rule of DeepSeek-V3 and GLM-4-MoE).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spot_jax.config import Experts
from spot_jax.models import layers


def route(
    experts: Experts,
    x: Float[Array, "T D"],
    router: Float[Array, "E D"],
    bias: Float[Array, " E"] | None,
) -> tuple[Int[Array, "T J"], Float[Array, "T J"]]:
    """The `top_k` experts of every token and their weights, float32. Ties: the lowest expert."""
    # By default a TPU multiplies float32 in bfloat16, and a GPU may in TF32: other experts.
    logits = jnp.einsum(
        "td,ed->te",
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if experts.router == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias.astype(jnp.float32)[None]
    if experts.num_groups > 1:
        grouped = choice.reshape(len(x), experts.num_groups, -1)
        best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        _, groups = jax.lax.top_k(best, experts.top_groups)
        kept = jnp.any(groups[:, :, None] == jnp.arange(experts.num_groups)[None, None], axis=1)
        choice = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, chosen = jax.lax.top_k(choice, experts.top_k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * experts.scale


def feed_forward(
    experts: Experts, weights: Mapping[str, Array], x: Float[Array, "*n D"]
) -> Float[Array, "*n D"]:
    """Routed experts, and the shared one if there is one.

    Args:
      experts: see `Experts`.
      weights: of one layer: `router`, `router_bias`, `experts_gate`, `experts_up` `[E, F, D]`,
        `experts_down [E, D, F]`, `shared_gate`, `shared_up`, `shared_down`.
      x: tokens.
    """
    flat = x.reshape(-1, x.shape[-1])
    chosen, share = route(experts, flat, weights["router"], weights.get("router_bias"))
    # Tokens in order of their experts, so that each expert is one matmul over its run of rows.
    place = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=experts.num_experts).astype(jnp.int32)
    rows = flat[place // experts.top_k]
    gate = _grouped(rows, weights["experts_gate"], sizes)
    up = _grouped(rows, weights["experts_up"], sizes)
    out = _grouped(jax.nn.silu(gate) * up, weights["experts_down"], sizes)
    # Back in order of tokens, so that the sum over a token's experts has one order for all.
    out = out[jnp.argsort(place)].reshape(*chosen.shape, -1)
    total = jnp.einsum("tj,tjd->td", share, out.astype(jnp.float32)).astype(x.dtype)
    if experts.shared_size:
        total = total + layers.swiglu(
            flat, weights["shared_gate"], weights["shared_up"], weights["shared_down"]
        )
    return total.reshape(x.shape)


def _grouped(rows: Float[Array, "M I"], weight: Float[Array, "E O I"], sizes: Int[Array, " E"]):
    """`rows @ weight[e].T` for the run of rows of each expert e."""
    return jax.lax.ragged_dot_general(rows, weight, sizes, _TRANSPOSED)


# Contracts the last axis of both sides: the weights keep the [out, in] layout of checkpoints.
_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
