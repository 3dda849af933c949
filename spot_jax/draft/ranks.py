"""Calibrated sets of rank formulas: Spiffy (arXiv 2509.18085) and greedy coverage.

A formula is a state in the terms of the freshest distributions: which places of the confidence
ranking have been committed since the root, and with tokens of which rank.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spot_jax.commit import rank
from spot_jax.draft.context import DraftContext, Draws, committed, coupled_draws, stale_score
from spot_jax.draft.tree import cut, empty_tree
from spot_jax.state import NO_PARENT, DraftTree, State

# Steps of a formula in order, each the (position rank, token rank) pairs that it commits.
Formula = tuple[tuple[tuple[int, int], ...], ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How formulas are read.

    Attributes:
      coupled: ranks follow the draws that the target's own noise gives if its distributions stay
        as they are, at the step of each pair; otherwise the plain probabilities, as published.
        The same at temperature 0.
      prune: a budget with fewer nodes than formulas keeps those of highest score (Spiffy, v4);
        otherwise the first that fit.
    """

    coupled: bool = False
    prune: bool = False


class Ranks(NamedTuple):
    """Drafts a calibrated set of formulas. `train.calibrate` makes them, `load_ranks` reads them.

    Formulas that do not fit the state are left out: of ranks that it does not have, or completing
    the block, which needs no check. Equal states are one node.

    Attributes:
      position: rank of each pair among the positions that may be committed, by the rule's ranking
        of the stale reading (the most probable token's probability, ties to the lowest position);
        -1 behind the last pair.
      token: rank of the pair's token at its position.
      after: commits between the root and the step of the pair.
      log_share: log of the share of calibration points whose future passed through the formula.
      options: static.
    """

    position: Int[Array, "F K"]
    token: Int[Array, "F K"]
    after: Int[Array, "F K"]
    log_share: Float[Array, " F"]
    options: RankOptions

    def __call__(self, context: DraftContext, budget: int) -> DraftTree:
        nodes, fits, local = _instantiate(self, context)
        if self.options.coupled:
            # Other draws at another step may turn two formulas into one state.
            fits = fits & ~_repeats(nodes, fits)
        num = min(budget - 1, len(self.log_share))
        if self.options.prune and num < len(self.log_share):
            score = jnp.where(fits, _pruning_score(self, nodes, fits, local), -jnp.inf)
            fits = fits & (rank(score, fits) < num)
        # The first `num` that are left, in their order.
        chosen = jnp.argsort(~fits, axis=-1, stable=True)[:, :num]

        def fill(slots, found):
            return slots.at[:, 1 : num + 1].set(found)

        valid = jnp.take_along_axis(fits, chosen, axis=-1)
        tree = empty_tree(context.root, budget)
        tree = tree._replace(
            tokens=fill(tree.tokens, jnp.take_along_axis(nodes.tokens, chosen[..., None], axis=1)),
            masked=fill(tree.masked, jnp.take_along_axis(nodes.masked, chosen[..., None], axis=1)),
            valid=fill(tree.valid, valid),
            log_value=fill(tree.log_value, jnp.where(valid, self.log_share[chosen], -jnp.inf)),
        )
        return cut(tree._replace(parent=_parents(tree)), context)


def make_ranks(
    formulas: Sequence[Formula], shares: Sequence[float], options: RankOptions = RankOptions()
) -> Ranks:
    """Lays formulas out as arrays.

    Args:
      formulas: most useful first.
      shares: of the calibration points, those whose future passed through each.
      options: how they are read.
    """
    width = max(sum(map(len, formula)) for formula in formulas)
    table = np.full((3, len(formulas), width), -1, np.int32)
    for row, formula in enumerate(formulas):
        pairs = [(*pair, sum(map(len, formula[:i]))) for i, s in enumerate(formula) for pair in s]
        table[:, row, : len(pairs)] = np.transpose(pairs)
    log_share = jnp.log(jnp.asarray(shares, jnp.float32))
    position, token, after = map(jnp.asarray, table)
    return Ranks(position, token, after, log_share, options)


def position_ranks(context: DraftContext, coupled: bool) -> Int[Array, "B L"]:
    """Rank of each position that may be committed, from 0; the block length elsewhere."""
    counts = committed(context.root.masked)
    top = context.reading.top_tokens[..., :1], context.reading.top_log_probs[..., :1]
    draws = Draws(*top, jnp.zeros_like(top[1]), jnp.zeros_like(top[0]))
    if coupled:
        draws = coupled_draws(context, counts, 1)
    return rank(stale_score(context, draws, counts), context.rule.candidates(context.root.masked))


def _instantiate(ranks: Ranks, context: DraftContext):
    """States of the formulas `[B, F, L]`, which of them fit, and their mean log-probability."""
    root, reading, used = context.root, context.reading, ranks.position >= 0
    rows, length = root.masked.shape
    place = position_ranks(context, ranks.options.coupled)
    of_rank = jnp.argmax(place[:, None] == jnp.arange(length)[None, :, None], axis=-1)
    where = of_rank[:, ranks.position]
    row = jnp.arange(rows)[:, None, None]
    if ranks.options.coupled:
        held, counts = reading.top_tokens.shape[-1], committed(root.masked)
        draws = jax.vmap(lambda after: coupled_draws(context, counts + after, held))(
            jnp.arange(ranks.position.shape[1])
        )
        index = ranks.after[None], row, where, ranks.token[None]
        token, log_prob = draws.tokens[index], draws.confidence[index]
    else:
        index = row, where, ranks.token[None]
        token, log_prob = reading.top_tokens[index], reading.top_log_probs[index]
    there = jnp.sum(place < length, axis=-1)[:, None, None]
    exists = (ranks.position[None] < there) & (ranks.token < reading.top_tokens.shape[-1])[None]
    fits = jnp.all(~used[None] | (exists & jnp.isfinite(log_prob)), axis=-1)
    hit = used[None, ..., None] & (where[..., None] == jnp.arange(length)[None, None, None])
    newly = jnp.any(hit, axis=2)
    tokens = jnp.sum(jnp.where(hit, token[..., None], 0), axis=2)
    nodes = State(jnp.where(newly, tokens, root.tokens[:, None]), root.masked[:, None] & ~newly)
    local = jnp.mean(log_prob, axis=-1, where=jnp.broadcast_to(used[None], log_prob.shape))
    return nodes, fits & jnp.any(nodes.masked, axis=-1), local


def _pairs(nodes: State):
    """Tokens and masks of node n, then those of node m, to compare as `[B, N, N, L]`."""
    tokens, masked = nodes
    return tokens[:, :, None], masked[:, :, None], tokens[:, None], masked[:, None]


def _repeats(nodes: State, fits: Bool[Array, "B F"]) -> Bool[Array, "B F"]:
    """Formulas whose state is that of an earlier one that fits."""
    tokens, masked, other_tokens, other_masked = _pairs(nodes)
    same = jnp.all((tokens == other_tokens) & (masked == other_masked), axis=-1)
    earlier = jnp.tri(fits.shape[1], k=-1, dtype=bool)[None]
    return jnp.any(same & earlier & fits[:, None], axis=-1)


def _contains(nodes: State) -> Bool[Array, "B N N"]:
    """Whether node n has all that node m has committed, and more."""
    tokens, masked, other_tokens, other_masked = _pairs(nodes)
    agrees = other_masked | (~masked & (tokens == other_tokens))
    return jnp.all(agrees, axis=-1) & jnp.any(other_masked & ~masked, axis=-1)


def _pruning_score(ranks: Ranks, nodes: State, fits, local) -> Float[Array, "B F"]:
    """Log of the geometric mean of a node's own score and those of its children, from below.

    Published so far. A node none of whose parents is kept cannot be reached, so here no score is
    above that of the best parent.
    """
    used = ranks.position >= 0
    begins = jnp.diff(ranks.after, prepend=-1, axis=-1) != 0
    steps = jnp.sum(used & begins, axis=-1)[None]
    parent = _contains(nodes) & (steps[..., None] == steps[:, None] + 1) & fits[:, None]
    child = jnp.swapaxes(parent, 1, 2) & fits[:, None]
    number = jnp.sum(child, axis=-1, dtype=jnp.float32)
    most = ranks.position.shape[1]

    def rise(i, score):
        total = local + jnp.sum(jnp.where(child, score[:, None], 0.0), axis=-1)
        return jnp.where(steps == most - i, total / (1 + number), score)

    def fall(depth, score):
        best = jnp.max(jnp.where(parent, score[:, None], -jnp.inf), axis=-1)
        return jnp.where(steps == depth, jnp.minimum(score, best), score)

    score = jax.lax.fori_loop(0, most, rise, local)
    return jax.lax.fori_loop(2, most + 1, fall, score)


def _parents(tree: DraftTree) -> Int[Array, "B N"]:
    """The deepest other node that a node contains, the root if there is none between."""
    nodes = State(tree.tokens, tree.masked)
    inside = _contains(nodes) & tree.valid[:, None] & tree.valid[..., None]
    deepest = jnp.argmax(jnp.where(inside, committed(tree.masked)[:, None], -1), axis=-1)
    return jnp.where(jnp.any(inside, axis=-1), deepest, NO_PARENT)
