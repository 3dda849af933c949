"""From hidden states to readings: the sampling head, reduced in chunks of the vocabulary.

`[B, N, L, V]` logits of a real vocabulary are gigabytes, so they are never held at once (only the
filters, which need a sorted row, materialise one node's at a time). The log-probability of the
most probable token is computed as `-log1p(rest)` with `rest` the sum of all the others: near
certainty `logit - logsumexp` rounds to a handful of values, and the commit order would be decided
by ties.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spot_jax.config import Sampling, TargetConfig
from spot_jax.state import Reading

CHUNK = 8192
TINY = 1e-37

# gumbel(token_ids [T]) -> noise [*n, L, T]
Gumbel = Callable[[Int[Array, " T"]], Float[Array, "*n L T"]]


class _Sums(NamedTuple):
    """Running reduction of a distribution around its highest logit.

    `rest` and `spread` sum `exp(l - top)` and `exp(l - top) * (top - l)` over all tokens but the
    top one, so both stay precise when the top token is nearly certain.
    """

    top: Array
    rest: Array
    spread: Array

    def merge(self, other: "_Sums") -> "_Sums":
        high = jnp.maximum(self.top, other.top)
        rests, spreads = zip(*(x._seen_from(high) for x in (self, other)), strict=True)
        # The lower of the two tops joins the rest.
        gap = high - jnp.minimum(self.top, other.top)
        gap = jnp.where(jnp.isfinite(gap), gap, 0.0)
        weight = jnp.where(jnp.isfinite(jnp.minimum(self.top, other.top)), jnp.exp(-gap), 0.0)
        return _Sums(high, sum(rests) + weight, sum(spreads) + weight * gap)

    def _seen_from(self, high: Array) -> tuple[Array, Array]:
        gap = jnp.where(jnp.isfinite(self.top), high - self.top, 0.0)
        shrink = jnp.where(jnp.isfinite(self.top), jnp.exp(-gap), 0.0)
        return shrink * self.rest, shrink * (self.spread + gap * self.rest)


def _sums(logits: Float[Array, "*n V"]) -> _Sums:
    index = jnp.argmax(logits, axis=-1)
    top = jnp.max(logits, axis=-1)
    gap = jnp.where(jnp.isfinite(top), top, 0.0)[..., None] - logits
    others = _expand(jnp.arange(logits.shape[-1]), logits) != index[..., None]
    weight = jnp.where(others, jnp.exp(-gap), 0.0)
    spread = jnp.where(weight > 0, weight * gap, 0.0)
    return _Sums(top, jnp.sum(weight, axis=-1), jnp.sum(spread, axis=-1))


def _pack(sums: _Sums) -> Float[Array, "3 ..."]:
    """One array to carry. Carried apart, XLA would drop what nobody reads and fuse the rest
    otherwise, and the bits of a confidence would depend on what a drafter looks at."""
    return jnp.stack(sums)


def _unpack(packed: Float[Array, "3 ..."]) -> _Sums:
    return _Sums(*jnp.unstack(packed))


def drawable(config: TargetConfig, sampling: Sampling, ids: Int[Array, " T"]) -> Bool[Array, " T"]:
    """Which token ids may be drawn: real tokens that are not suppressed, and never the mask."""
    allowed = ~jnp.isin(ids, jnp.array(sampling.suppressed, ids.dtype))
    if sampling.reference_vocab:
        return allowed
    return allowed & (ids < config.num_token_ids) & (ids != config.mask_id)


def read(
    hidden: Float[Array, "*n L D"],
    head: Float[Array, "V D"],
    gumbel: Gumbel,
    sampling: Sampling,
    config: TargetConfig,
    num_top: int,
    chunk: int = CHUNK,
) -> Reading:
    """Reads every position of every node.

    Args:
      hidden: final hidden states, rows of the predicted positions.
      head: output matrix.
      gumbel: noise of given token ids at every position; not called at temperature 0.
      sampling: see `Sampling`.
      config: of the target: which ids exist.
      num_top: R, most probable tokens to keep.
      chunk: vocabulary rows a time. It does not change which noise a token gets.

    Returns:
      A `Reading` over `[*n, L]`. Ties go to the lowest token id.
    """
    num_rows = head.shape[0]
    chunk = min(chunk, num_rows)
    num_top = min(num_top, num_rows)
    temperature = sampling.temperature
    cutoff = _cutoff(hidden, head, sampling, config) if sampling.filters else None
    lead = hidden.shape[:-1]

    def reduce_chunk(carry, start):
        index, draw, tops, sums = carry
        # The last chunk is shifted back to stay inside; rows already seen are hidden.
        begin = jnp.minimum(start, num_rows - chunk)
        ids = begin + jnp.arange(chunk)
        logits = _logits(hidden, jax.lax.dynamic_slice_in_dim(head, begin, chunk, 0))
        open_ids = drawable(config, sampling, ids) & (ids >= start)
        logits = jnp.where(_expand(open_ids, logits), logits, -jnp.inf)
        scaled = logits / temperature if temperature > 0 else logits
        if cutoff is not None:
            scaled = jnp.where(scaled >= cutoff[..., None], scaled, -jnp.inf)
        measured = logits if sampling.confidence == "raw" else scaled
        perturbed = scaled + gumbel(ids) if temperature > 0 else scaled
        best = jnp.argmax(perturbed, axis=-1)
        value = jnp.take_along_axis(perturbed, best[..., None], axis=-1)[..., 0]
        logit = jnp.take_along_axis(measured, best[..., None], axis=-1)[..., 0]
        better = value > draw[0]
        index = jnp.where(better, ids[best], index)
        draw = (jnp.where(better, value, draw[0]), jnp.where(better, logit, draw[1]))
        values, places = jax.lax.top_k(measured, min(num_top, chunk))
        values = jnp.concatenate([tops[0], values], axis=-1)
        tokens = jnp.concatenate([tops[1], ids[places]], axis=-1)
        values, places = jax.lax.top_k(values, num_top)
        tops = (values, jnp.take_along_axis(tokens, places, axis=-1))
        return (index, draw, tops, _pack(_unpack(sums).merge(_sums(measured)))), None

    low = jnp.full(lead, -jnp.inf, jnp.float32)
    carry = (
        jnp.zeros(lead, jnp.int32),
        (low, low),
        (
            jnp.full((*lead, num_top), -jnp.inf, jnp.float32),
            jnp.zeros((*lead, num_top), jnp.int32),
        ),
        _pack(_Sums(low, jnp.zeros_like(low), jnp.zeros_like(low))),
    )
    starts = jnp.arange(0, num_rows, chunk)
    if len(starts) == 1:
        carry, _ = reduce_chunk(carry, starts[0])
    else:
        carry, _ = jax.lax.scan(reduce_chunk, carry, starts)
    index, (_, logit), (values, tokens), sums = carry
    sums = _unpack(sums)
    log_total = jnp.log1p(sums.rest)
    return Reading(
        token=index,
        confidence=(logit - sums.top) - log_total,
        top_log_probs=(values - sums.top[..., None]) - log_total[..., None],
        top_tokens=tokens,
        log_doubt=jnp.log(jnp.maximum(sums.rest, TINY)) - log_total,
        entropy=log_total + sums.spread / (1.0 + sums.rest),
    )


def _logits(hidden, head):
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)


def _expand(mask, like):
    return mask.reshape((1,) * (like.ndim - 1) + mask.shape)


def _cutoff(hidden, head, sampling: Sampling, config: TargetConfig) -> Float[Array, "*n L"]:
    """Tempered logit between those that survive top-k and then top-p and those that do not.

    One block at a time. Half-way between the two, because a chunk's logits are not these bit for
    bit: compared with the lowest survivor itself, that one would be lost to a rounding.
    """
    ids = jnp.arange(head.shape[0])
    allowed = drawable(config, sampling, ids)

    def of_block(block):
        logits = _logits(block, head) / (sampling.temperature or 1.0)
        ordered = jnp.sort(jnp.where(allowed[None], logits, -jnp.inf), axis=-1, descending=True)
        stays = jnp.isfinite(ordered)
        if 0 < sampling.top_k < head.shape[0]:
            stays &= ordered >= ordered[..., sampling.top_k - 1, None]
        if sampling.top_p < 1:
            probs = jax.nn.softmax(jnp.where(stays, ordered, -jnp.inf), axis=-1)
            # A token stays while the mass before it is short of top_p: the first always does.
            stays &= jnp.cumsum(probs, axis=-1) - probs < sampling.top_p
        lowest = jnp.min(jnp.where(stays, ordered, jnp.inf), axis=-1, keepdims=True)
        removed = jnp.max(jnp.where(ordered < lowest, ordered, -jnp.inf), axis=-1)
        # The best token survives whatever ties with it within roundings.
        top = ordered[..., 0]
        return jnp.minimum((lowest[..., 0] + removed) / 2, top - 1e-4 * jnp.maximum(1, abs(top)))

    blocks = hidden.reshape(-1, *hidden.shape[-2:])
    return jax.lax.map(of_block, blocks).reshape(hidden.shape[:-1])
