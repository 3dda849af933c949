"""One pass: the plain decoder's step on every slot, in one forward of the target."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

from spot_jax import commit, noise
from spot_jax.config import Sampling, TargetConfig
from spot_jax.costs import Costs
from spot_jax.draft.context import committed
from spot_jax.forward import Cache, CacheKind, Scene, forward
from spot_jax.models.target import TargetModel, head_weight
from spot_jax.reading import CHUNK, read
from spot_jax.rules import HandOver
from spot_jax.state import Reading, State

# Far beyond use: sizes of arrays that grow with it stay within 32 bits.
MAX_BUDGET = 4096


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to decode. Two calls with equal configs and shapes compile once.

    Attributes:
      max_new_tokens: longest answer, exact.
      budget: block states a pass may check, the known next one included. 1 drafts nothing.
      sampling: how tokens are drawn.
      rule: which positions a step commits.
      stop_at_eos: whether an end-of-text token ends a row.
      cache: what is kept of positions outside the block. Block-causal targets have an exact
        `prefix` cache. Full attention has none that is exact: `none` recomputes the canvas in
        every pass, `dual` freezes keys and values of all other positions when a block opens
        (Fast-dLLM, arXiv 2505.22618), which is a plain decoder of its own: drafting reproduces
        it exactly, but its texts differ from those of `none`. Where the target does not shift,
        the step that opens a block equals one on the logits of the forward that fills the cache,
        as in Fast-dLLM's DualCache; targets that shift read a block's first position from that
        forward until it is committed. None takes the exact one.
      reference_shape: plain decoding only: run through the compiled shape of this budget, so
        that results can be compared with drafted decoding bit for bit.
      look_ahead: whether drafts go on behind the end of a block, so that one pass may cross it.
        For block-causal targets without hand-over. Exact up to rounding, which differs between
        the shapes of the two programs: equal to plain decoding unless a decision is a tie. Pays
        where blocks are short.
      costs: what passes and drafts take on the device: then the budget is the most, and how many
        states are drafted and checked is chosen anew for every pass, by what is expected of them.
        Where no size can pay, decoding is plain. Exact up to rounding, as with look-ahead; not
        together with it.
      num_top: most probable tokens kept of a reading, for drafters.
      chunk: vocabulary rows reduced at a time.
    """

    max_new_tokens: int = 256
    budget: int = 1
    sampling: Sampling = Sampling()
    rule: commit.Rule = commit.TopN()
    stop_at_eos: bool = True
    cache: CacheKind | None = None
    reference_shape: int = 0
    look_ahead: bool = False
    costs: Costs | None = None
    num_top: int = 32
    chunk: int = CHUNK

    def __post_init__(self):
        for name in ("budget", "reference_shape"):
            if getattr(self, name) > MAX_BUDGET:
                raise ValueError(f"{name} must be at most {MAX_BUDGET}, got {getattr(self, name)}")
        for name in ("max_new_tokens", "budget", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_top < 2:
            raise ValueError(f"num_top must be at least 2, got {self.num_top}")
        if self.reference_shape < 0:
            raise ValueError(f"reference_shape must be 0 or more, got {self.reference_shape}")
        if self.cache not in (None, "prefix", "none", "dual"):
            raise ValueError(f"cache must be prefix, none or dual, got {self.cache!r}")
        if self.costs is not None and self.look_ahead:
            raise ValueError("costs do not go with look_ahead: its passes need their whole budget")

    @property
    def num_slots(self) -> int:
        """Slots of a pass. Two at least: a pass that opens a block also reads the finished one."""
        return max(self.budget, self.reference_shape, 2)

    def cache_of(self, target: TargetConfig) -> CacheKind:
        """The kind of cache for a target. Raises ValueError where `cache` does not fit it."""
        exact: CacheKind = "prefix" if target.attention == "block_causal" else "none"
        if self.cache is None or self.cache == exact:
            return exact
        if target.attention == "block_causal" or self.cache == "prefix":
            raise ValueError(
                f"cache {self.cache!r} does not fit {target.attention} attention: leave it out for "
                f"the exact one, {exact!r}"
            )
        return self.cache

    def check(self, target: TargetConfig) -> None:
        """Raises ValueError where an option does not fit a target."""
        self.cache_of(target)
        if self.look_ahead and (target.attention != "block_causal" or target.hand_over):
            kind = (
                "hand-over between blocks" if target.hand_over else f"{target.attention} attention"
            )
            raise ValueError(
                f"look_ahead does not fit {kind}: it needs block-causal attention and blocks that "
                "are read from their own masks"
            )

    def settled(self, target: TargetConfig) -> "DecodeConfig":
        """The same with the sizes that can pay alone; plain, without costs, where none can."""
        if self.costs is None:
            return self
        costs = self.costs.in_use(self.budget, target.block_length)
        budget = costs.sizes[-1]
        return dataclasses.replace(self, budget=budget, costs=costs if budget > 1 else None)

    def rule_of(self, target: TargetConfig) -> commit.Rule:
        """The rule, with what a family prescribes about the first position of a block."""
        return HandOver(self.rule) if target.hand_over else self.rule


class Pass(NamedTuple):
    """One evaluation of the step on every slot; `kept` goes into the cache."""

    successor: State
    chosen: Bool[Array, "B N L"]
    reading: Reading
    kept: Any


def evaluate(
    target: TargetModel,
    config: DecodeConfig,
    keys: Key[Array, " B"],
    scene: Scene,
    cache: Cache,
    nodes: State,
    num_slots: int,
) -> Pass:
    """The plain decoder's step on the first `num_slots` slots, in one forward.

    Args:
      target: the target.
      config: how to decode.
      keys: request keys.
      scene: where the pass stands.
      cache: see `forward`.
      nodes: states `[B, N, L]`; see `forward` for slot 0 of rows that open a block.
      num_slots: slots to evaluate.
    """
    shape = target.config
    nodes = jax.tree.map(lambda x: x[:, :num_slots], nodes)
    hidden, positions, kept = forward(target, config.cache_of(shape), scene, cache, nodes.tokens)
    counts = committed(nodes.masked)
    reading = read(
        hidden,
        head_weight(target.params),
        lambda ids: noise.token_gumbel(keys, positions, counts, ids[None, None, None]),
        config.sampling,
        shape,
        config.num_top,
        config.chunk,
    )
    if shape.hand_over:
        reading = _greedy_first(reading)
    successor, chosen = commit.commit(
        nodes, reading, config.rule_of(shape), noise.order_draws(keys, positions, counts)
    )
    return Pass(successor, chosen, reading, kept)


def _greedy_first(reading: Reading) -> Reading:
    """The reference hands over the likeliest token at any temperature."""
    first = jnp.broadcast_to(jnp.arange(reading.token.shape[-1]) == 0, reading.token.shape)
    return reading._replace(
        token=jnp.where(first, reading.top_tokens[..., 0], reading.token),
        confidence=jnp.where(first, reading.top_log_probs[..., 0], reading.confidence),
    )


def widen(result: Pass, num_slots: int) -> Pass:
    """Pads a pass to `num_slots`. What is added is no valid node and is never visited."""

    def pad(x):
        more = jnp.broadcast_to(x[:, :1], (len(x), num_slots - x.shape[1], *x.shape[2:]))
        return jnp.concatenate([x, more], axis=1)

    padded = jax.tree.map(pad, result._replace(kept=None))
    return padded._replace(kept=result.kept)
