"""The target: one decoder trunk for every family, whose attention is an argument.

The trunk owns weights and arithmetic per position; who sees whom is decided by the `attend`
function that the caller passes (block-causal prefill, nodes of a draft tree, doubled training
sequences). Like layers are stacked on a leading axis and scanned.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spot_jax.config import TargetConfig
from spot_jax.models import experts, layers

# attend(query [..., H, T, K], key [..., G, T, K], value, memory_of_this_layer)
#   -> (output [..., H, T, K], anything to keep of this layer)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]


def attention_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Shape of the norms and attention weights of one layer."""
    width, head = config.hidden_size, config.head_dim
    query, keys = config.num_heads * head, config.num_kv_heads * head
    shapes = {
        "attention_norm": (width,),
        "q": (query, width),
        "k": (keys, width),
        "v": (keys, width),
        "o": (width, query),
        "mlp_norm": (width,),
    }
    if config.qk_norm:
        shapes |= {"q_norm": (head,), "k_norm": (head,)}
    if config.qkv_bias:
        shapes |= {"q_bias": (query,), "k_bias": (keys,), "v_bias": (keys,)}
    return shapes


def mlp_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Shape of the plain feed-forward of one layer."""
    width, inner = config.hidden_size, config.intermediate_size
    return {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}


def expert_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Shape of router, experts and shared expert of one layer."""
    experts, width = config.experts, config.hidden_size
    assert experts is not None
    number, inner, shared = experts.num_experts, experts.intermediate_size, experts.shared_size
    shapes = {
        "router": (number, width),
        "experts_gate": (number, inner, width),
        "experts_up": (number, inner, width),
        "experts_down": (number, width, inner),
    }
    if experts.bias:
        shapes["router_bias"] = (number,)
    if shared:
        shapes |= {
            "shared_gate": (shared, width),
            "shared_up": (shared, width),
            "shared_down": (width, shared),
        }
    return shapes


def param_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the flat tree.

    Weights of like layers are stacked as `layers_*`; the dense layers that come before layers with
    experts as `first_*`.
    """
    shapes = {"embed": (config.vocab_size, config.hidden_size), "norm": (config.hidden_size,)}
    first = 0 if config.experts is None else config.experts.first_dense
    stacks = [("layers", config.num_layers - first, mlp_shapes)]
    if config.experts is not None:
        stacks = [
            ("first", first, mlp_shapes),
            ("layers", config.num_layers - first, expert_shapes),
        ]
    for stack, number, of_feed_forward in stacks:
        if number:
            for name, shape in (attention_shapes(config) | of_feed_forward(config)).items():
                shapes[f"{stack}_{name}"] = (number, *shape)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def num_params(config: TargetConfig) -> int:
    """Number of parameters, from shapes alone."""
    return sum(math.prod(shape) for shape in param_shapes(config).values())


def head_weight(params: dict[str, Any]) -> Float[Array, "V D"]:
    """The output matrix: its own, or the embedding where the two are tied."""
    return params["head"] if "head" in params else params["embed"]


def apply_layer(config: TargetConfig, weights, x, cos, sin, attend: Attend, memory):
    """One pre-norm layer on `x [..., T, D]`; returns the new `x` and what `attend` keeps."""
    h = layers.rms_norm(x, weights["attention_norm"], config.rms_eps)
    query, key, value = (
        layers.split_heads(layers.linear(h, weights[name], weights.get(f"{name}_bias")), number)
        for name, number in (
            ("q", config.num_heads),
            ("k", config.num_kv_heads),
            ("v", config.num_kv_heads),
        )
    )
    if config.qk_norm:
        query = layers.rms_norm(query, weights["q_norm"], config.rms_eps)
        key = layers.rms_norm(key, weights["k_norm"], config.rms_eps)
    query = layers.rotate(query, cos, sin)
    key = layers.rotate(key, cos, sin)
    mixed, kept = attend(query, key, value, memory)
    x = x + layers.linear(layers.merge_heads(mixed), weights["o"])
    h = layers.rms_norm(x, weights["mlp_norm"], config.rms_eps)
    if config.experts is not None and "router" in weights:
        return x + experts.feed_forward(config.experts, weights, h), kept
    return x + layers.swiglu(h, weights["gate"], weights["up"], weights["down"]), kept


class Target(nn.Module):
    """Decoder trunk. `apply` returns final hidden states and what `attend` kept of each layer."""

    config: TargetConfig
    unroll: int = 1

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "*n T"],
        positions: Int[Array, "*n T"],
        attend: Attend,
        memory: Any = None,
    ) -> tuple[Float[Array, "*n T D"], Any]:
        """Runs the trunk.

        Args:
          tokens: token ids; leading axes are free (batch, or batch and nodes).
          positions: absolute positions, for the rotary embedding.
          attend: attention of one layer; sees queries, keys, values and that layer's memory.
          memory: pytree with a leading layer axis (the prefix cache), or None.

        Returns:
          Hidden states after the final norm, and `attend`'s second results stacked over layers.
        """
        config = self.config
        weights = {
            name: self.param(name, _initializer(name, config), shape)
            for name, shape in param_shapes(config).items()
        }
        cos, sin = layers.rotary(positions, config)

        def body(x, scanned):
            layer, index = scanned
            # The memory is indexed, not sliced between the stacks, which would copy it.
            of_layer = jax.tree.map(
                lambda m: jax.lax.dynamic_index_in_dim(m, index, keepdims=False), memory
            )
            return apply_layer(config, layer, x, cos, sin, attend, of_layer)

        x, done, kept = weights["embed"][tokens], 0, []
        for stack in ("first_", "layers_"):
            layer = {k.removeprefix(stack): w for k, w in weights.items() if k.startswith(stack)}
            if not layer:
                continue
            number = len(layer["mlp_norm"])
            scanned = (layer, jnp.arange(done, done + number))
            x, kept_here = jax.lax.scan(body, x, scanned, unroll=min(self.unroll, number))
            kept.append(kept_here)
            done += number
        kept = kept[0] if len(kept) == 1 else jax.tree.map(lambda *k: jnp.concatenate(k), *kept)
        return layers.rms_norm(x, weights["norm"], config.rms_eps), kept


def _initializer(name: str, config: TargetConfig):
    if name.endswith("norm"):
        return nn.initializers.ones
    if name.endswith("bias"):
        return nn.initializers.zeros
    # Residual branches start small, so that depth does not inflate the stream.
    residual = name.endswith(("_o", "down"))
    return nn.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02)


class TargetModel(NamedTuple):
    """A target ready to decode: parameters and their static configuration, one pytree."""

    params: dict[str, Array]
    config: TargetConfig
