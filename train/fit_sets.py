"""Fits the set network to traces of plain decoding under a threshold, or of n commits a step.

    python -m train.fit --config configs/home_sets.py --traces runs/sets-9 runs/sets-8 \\
        --out runs/home-sets
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spot_jax.commit import Threshold, TopN, rank
from spot_jax.config import Sampling
from spot_jax.draft import Chain, ConfidenceSets, Drafter, SpotSets
from spot_jax.draft.context import Draws, committed, coupled_draws, stale_reading
from spot_jax.drafter_io import save_drafter
from spot_jax.models.order import OrderConfig, OrderNetwork
from spot_jax.models.sets import SetScores, set_features, set_log_prob, set_scores
from spot_jax.noise import order_draws
from spot_jax.rule_io import rule_to_json
from train.fit import STORED, OrderTraining, Pairs
from train.parallel import LossFn
from train.replay import context_of, future_state, future_step
from train.traces import TraceInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetTraining(OrderTraining):
    """One fit of the set network; options as of `OrderTraining`, a depth being a step."""

    def init(self, pairs: Pairs, info: TraceInfo) -> Any:
        features = set_question(pairs, self.order, info.sampling, info.rule).features
        network = OrderNetwork(self.order, num_scores=2)
        return network.init(jax.random.key(self.seed), features[:1])["params"]

    def loss(self, info: TraceInfo) -> LossFn:
        return functools.partial(
            set_loss, config=self.order, sampling=info.sampling, rule=info.rule
        )

    def drafters(self, params: Any) -> dict[str, Drafter]:
        return {
            "spot-sets": SpotSets(params, self.order),
            "chain": Chain(),
            "tree": ConfidenceSets(),
        }

    def worse(self, figures: dict[str, Any]) -> bool:
        return figures["next_set"] < figures["stale_set"]

    def save(self, directory: Path, params: Any, infos, train_sets, figures) -> None:
        first = next(f for f in figures if f["depth"] == "first")
        rules = [rule_to_json(info.rule) for info in infos]
        metadata = {
            "block_lengths": sorted({i.block_length for i in infos}),
            "rules": [r for k, r in enumerate(rules) if r not in rules[:k]],
            "temperatures": sorted({float(i.sampling.temperature) for i in infos}),
            "trained_on": infos[0].target,
            "num_blocks": sum(len(t.start) for t in train_sets),
            "accuracy": {"drafter": first["next_set"], "stale_confidence": first["stale_set"]},
        }
        save_drafter(directory, params, self.order, metadata, kind="spot-sets", dtype=STORED)


class SetQuestion(NamedTuple):
    """What the set network is asked and what is right.

    Attributes:
      features: `[B, L, F]`.
      masked: of the state `depth` true steps below the root.
      drafted: positions committed between.
      draws: what would be drawn there.
      stale: the set that the rule would commit on the stale reading, `[B, L]`.
      chosen: the set that was committed, `[B, L]`.
      right: which of the draws were, `[B, L, A]`.
    """

    features: jax.Array
    masked: jax.Array
    drafted: jax.Array
    draws: Draws
    stale: jax.Array
    chosen: jax.Array
    right: jax.Array


def set_question(
    pairs: Pairs, config: OrderConfig, sampling: Sampling, rule: TopN | Threshold
) -> SetQuestion:
    """Places each pair at its depth on the true path."""
    points = pairs.points
    context = context_of(points, sampling, rule)
    masked = future_state(points, pairs.depth).masked
    step, known = future_step(points)
    counts = committed(masked)
    draws = coupled_draws(context, counts, config.num_alternatives)
    uniform = order_draws(context.keys, context.positions, counts)
    return SetQuestion(
        features=set_features(
            context.reading,
            draws.confidence,
            draws.lead,
            draws.place,
            points.read_masked,
            points.root_masked,
            masked,
            rule,
        ),
        masked=masked,
        drafted=jnp.sum(points.root_masked & ~masked, axis=-1),
        draws=draws,
        stale=rule(masked, stale_reading(context, draws), uniform),
        chosen=known & (step == pairs.depth[:, None]),
        right=draws.tokens == points.tokens[..., None],
    )


def question_log_prob(scores: SetScores, asked: SetQuestion, rule: TopN | Threshold) -> jax.Array:
    """Log-probability of what was committed, `[B]`.

    A token that is none of the alternatives cannot be drafted, and counts as any of them: where
    it was committed still teaches which positions are.
    """
    found = jnp.any(asked.right, axis=-1, keepdims=True)
    tokens = asked.right | ~found
    return set_log_prob(scores, asked.masked, rule, asked.chosen[:, None], tokens[:, None])[:, 0]


def set_loss(
    params, pairs: Pairs, *, config: OrderConfig, sampling: Sampling, rule: TopN | Threshold
):
    """Negative log-likelihood of the next set with its tokens; sums over the batch.

    Under a threshold this is the binary cross-entropy of all positions, but for the steps at which
    too few crossed. `next_set` and `stale_set` count sets that are guessed whole, tokens included.
    """
    asked = set_question(pairs, config, sampling, rule)
    scores = set_scores(params, config, asked.features, asked.draws.confidence, rule)
    weight = pairs.weight

    def share(hit):
        return jnp.sum(weight * hit)

    first = jnp.all(asked.right[..., 0] | ~asked.chosen, axis=-1)
    guess = likeliest(scores, asked.masked, rule)
    return -share(question_log_prob(scores, asked, rule)), {
        "count": jnp.sum(weight),
        "next_set": share(first & jnp.all(guess == asked.chosen, axis=-1)),
        "stale_set": share(first & jnp.all(asked.stale == asked.chosen, axis=-1)),
        "stale_token": share(first),
        "positions": share(jnp.sum(asked.chosen, axis=-1)),
    }


def likeliest(scores: SetScores, masked, rule: TopN | Threshold):
    """The positions that more likely cross than not, or the best where these are too few."""
    order = jnp.max(scores.order, axis=-1)
    best = masked & (rank(order, masked) < rule.number(masked)[..., None])
    if isinstance(rule, TopN):
        return best
    crossing = masked & (jax.nn.logsumexp(scores.cross, axis=-1) > 0)
    enough = jnp.sum(crossing, axis=-1) >= rule.number(masked)
    return jnp.where(enough[..., None], crossing, best)
