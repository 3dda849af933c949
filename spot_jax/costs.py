"""Budget by cost: how many states to draft, and how many of them to check in a pass.

A pass of a size is worth the steps that it is expected to make over the time that it takes. The
first slots of a tree are a tree, so one that was drafted may be checked in part. Drafting takes
time too, and its size is chosen before its states are known: by what slots of earlier trees were
worth. Whatever is chosen, tokens and steps are those of plain decoding.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spot_jax.state import DraftTree

# Of what was seen, the share that counts a pass later: sizes long untried are tried again.
MEMORY = 0.95
# Rows that what is assumed before anything was seen counts for.
PRIOR = 4.0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Costs:
    """What passes and drafts take on a device, in any one unit: only ratios matter.

    Attributes:
      sizes: states of a pass, ascending from 1 and 2: a pass that opens a block reads two.
      evaluate: time of a pass of each size.
      draft: time to draft a tree of each size; 0 for the root alone.
    """

    sizes: tuple[int, ...]
    evaluate: tuple[float, ...]
    draft: tuple[float, ...]

    def __post_init__(self):
        if self.sizes[:2] not in ((1,), (1, 2)) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes must ascend from 1 and 2, got {self.sizes}")
        for name, values in (("evaluate", self.evaluate), ("draft", self.draft)):
            if len(values) != len(self.sizes):
                raise ValueError(
                    f"{name} must have {len(self.sizes)} times, one a size, got {len(values)}"
                )
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} must be finite, got {values}")
        if min(self.evaluate) <= 0:
            raise ValueError(f"evaluate must be above 0, got {self.evaluate}")
        if min(self.draft) < 0 or self.draft[0]:
            raise ValueError(f"draft must be 0 and then 0 or more, got {self.draft}")

    @classmethod
    def measured(cls, sizes, evaluate, draft) -> "Costs":
        """Costs from measured times, equal where these are about equal: such compile once.

        Larger sizes take no less than smaller ones, and numbers have two digits.
        """
        highest = [(max(evaluate[: i + 1]), max(draft[: i + 1])) for i in range(len(sizes))]
        unit = evaluate[0]
        return cls(
            tuple(sizes),
            tuple(float(f"{e / unit:.1e}") for e, _ in highest),
            tuple(float(f"{max(d, 0) / unit:.1e}") for _, d in highest),
        )

    def in_use(self, budget: int, block_length: int) -> "Costs":
        """The sizes up to `budget` that pay if drafts are good, with 2; only 1 where none does.

        A program that chooses is slower than the plain one even where it chooses 1, so there must
        be something to gain. A larger size for the same time is always as good.
        """
        rows = [
            row for row in zip(self.sizes, self.evaluate, self.draft, strict=True)
            if row[0] <= budget
        ]  # fmt: skip
        kept = []
        for place, (size, evaluate, draft) in enumerate(rows):
            steps = min(good_steps(size), block_length)
            pays = steps * self.evaluate[0] > evaluate + draft
            if pays and not any(e + d <= evaluate + draft for _, e, d in rows[place + 1 :]):
                kept.append(place)
        places = sorted({0, 1, *kept}) if kept else [0]
        sizes, evaluate, draft = zip(*(rows[place] for place in places), strict=True)
        return Costs(sizes, evaluate, draft)


def good_steps(size):
    """Steps that a pass of `size` states is taken to make as long as no draft was seen.

    A little less than SPOT makes on the bundled tasks (README).
    """
    return 1.0 + np.log(size)


class Experience(NamedTuple):
    """What choices in a batch go by, and how often each was made.

    Attributes:
      drafted: index of the size at which the tree was drafted.
      rows: by slot, rows in which it was drafted. This and the next two fade.
      hoped: by slot, the sum of the drafter's own estimates that decoding passes through it.
      reached: by slot, how often decoding did; where it was not checked, how often we expected it.
      passes: of each row at each size.
    """

    drafted: Int[Array, ""]
    rows: Float[Array, " N"]
    hoped: Float[Array, " N"]
    reached: Float[Array, " N"]
    passes: Int[Array, "B S"]


def begin(costs: Costs, num_rows: int) -> Experience:
    """Nothing seen, and the root alone drafted."""
    none = jnp.zeros(costs.sizes[-1], jnp.float32)
    passes = jnp.zeros((num_rows, len(costs.sizes)), jnp.int32)
    return Experience(jnp.int32(0), none, none, none, passes)


def choose_draft(
    costs: Costs,
    experience: Experience,
    running: Bool[Array, " B"],
    fresh: Bool[Array, " B"],
    opening: Bool[Array, ""],
) -> Int[Array, ""]:
    """Index of the size at which to draft.

    Args:
      costs: static.
      experience: so far.
      running: rows that are not done.
      fresh: those for which something can be drafted.
      opening: whether the pass opens a block, and so reads two states at least.
    """
    slot = np.arange(costs.sizes[-1])
    assumed = jnp.asarray(np.diff(good_steps(slot + 1), prepend=0.0), jnp.float32)
    share = (experience.reached + PRIOR * assumed) / (experience.rows + PRIOR)
    rows, able = (jnp.sum(x, dtype=jnp.float32) for x in (running, fresh))
    worth = jnp.where(slot == 0, rows, able * share)
    return _quickest(costs, worth, opening, jnp.array(costs.draft))


def choose_size(
    costs: Costs,
    experience: Experience,
    tree: DraftTree,
    running: Bool[Array, " B"],
    opening: Bool[Array, ""],
) -> Int[Array, ""]:
    """Index of the size at which to check a tree: see `choose_draft`."""
    worth = jnp.sum(jnp.where(running[:, None], _worth(experience, tree), 0.0), axis=0)
    drafting = jnp.array(costs.draft)[experience.drafted]
    return jnp.maximum(_quickest(costs, worth, opening, drafting), opening.astype(jnp.int32))


def learn(
    costs: Costs,
    experience: Experience,
    tree: DraftTree,
    running: Bool[Array, " B"],
    size: Int[Array, ""],
    visited: Bool[Array, "B N"],
) -> Experience:
    """The experience after a pass of the size of index `size`."""
    sizes, slot = jnp.array(costs.sizes), jnp.arange(costs.sizes[-1])
    drafted = (running & jnp.any(tree.valid[:, 1:], axis=-1))[:, None]
    checked = (slot < sizes[size])[None]

    def add(before, now):
        return MEMORY * before + jnp.sum(jnp.where(drafted, now, 0.0), axis=0)

    here = jnp.arange(len(costs.sizes)) == size
    return experience._replace(
        rows=add(experience.rows, (slot < sizes[experience.drafted])[None].astype(jnp.float32)),
        hoped=add(experience.hoped, _estimate(tree)),
        reached=add(
            experience.reached,
            jnp.where(checked, visited.astype(jnp.float32), _worth(experience, tree)),
        ),
        passes=experience.passes + (running[:, None] & here[None]).astype(jnp.int32),
    )


def _quickest(costs: Costs, worth: Float[Array, " N"], opening, drafting) -> Int[Array, ""]:
    """Index of the size of most steps a time; the smallest of equals."""
    advance = jnp.cumsum(worth)[jnp.array(costs.sizes) - 1]
    evaluate = jnp.array(costs.evaluate)
    evaluate = jnp.where(opening, jnp.maximum(evaluate, costs.evaluate[1]), evaluate)
    return jnp.argmax(advance / (evaluate + drafting)).astype(jnp.int32)


def _estimate(tree: DraftTree) -> Float[Array, "B N"]:
    """The drafter's probability that decoding passes through each node."""
    return jnp.where(tree.valid, jnp.exp(tree.log_value), 0.0)


def _worth(experience: Experience, tree: DraftTree) -> Float[Array, "B N"]:
    """The same, corrected by how such estimates of each slot have come true; 1 for the root."""
    truth = (experience.reached + PRIOR) / (experience.hoped + PRIOR)
    worth = jnp.minimum(_estimate(tree) * truth[None], 1.0)
    return worth.at[:, 0].set(1.0)
