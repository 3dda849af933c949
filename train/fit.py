"""Fits the order network, or the set network (`train.fit_sets`), to traces of plain decoding.

    python -m train.fit --config configs/home_spot.py --traces runs/traces-t0 runs/traces-t1 \\
        --out runs/home-spot
"""

import dataclasses
import functools
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from spot_jax.commit import Rule
from spot_jax.config import Sampling
from spot_jax.draft import Chain, ConfidenceTree, Drafter, Spot
from spot_jax.draft.context import Draws, committed, coupled_draws, stale_score
from spot_jax.drafter_io import load_drafter, save_drafter
from spot_jax.models.order import (
    OrderConfig,
    OrderNetwork,
    next_commit_log_probs,
    order_features,
)
from spot_jax.rule_io import rule_name
from train import traces as traces_lib
from train.loop import run_steps
from train.optimizer import muon
from train.parallel import LossFn, init_state, parallel_step, split_batch
from train.replay import Points, Values, context_of, future_state, future_step, replay, take_points

FEW_BLOCKS = 500
# Of the weights of a fitted drafter: half the size of float32, at the same steps per pass.
STORED = "float16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrderTraining:
    """One fit of the order network. Its methods are what fits of other networks do otherwise.

    Attributes:
      order: shape of the network.
      start: directory of a drafter of this shape to start from, relative to the checkout; None
        starts afresh.
      steps: optimiser steps.
      batch: (point, depth) pairs a step.
      learning_rate: of Muon on matrices; Adam on the rest takes a tenth.
      decay_share: share of the steps, at the end, over which the rate falls to 0.
      depth_decay: the share of pairs at depth d is proportional to this to the power d.
      held_out: share of the blocks never trained on.
    """

    order: OrderConfig = OrderConfig()
    start: str | None = None
    steps: int = 3000
    batch: int = 384
    learning_rate: float = 0.01
    decay_share: float = 0.6
    warmup_steps: int = 50
    depth_decay: float = 0.85
    held_out: float = 0.05
    seed: int = 0

    def init(self, pairs: "Pairs", info: traces_lib.TraceInfo) -> Any:
        """Fresh parameters, shaped by one batch."""
        features = question(pairs, self.order, info.sampling, info.rule).features
        return OrderNetwork(self.order).init(jax.random.key(self.seed), features[:1])["params"]

    def loss(self, info: traces_lib.TraceInfo) -> LossFn:
        """What is minimised on traces made in this way, with figures beside it."""
        return functools.partial(
            order_loss, config=self.order, sampling=info.sampling, rule=info.rule
        )

    def drafters(self, params: Any) -> dict[str, Drafter]:
        """The drafter that was fitted, and its rivals that need no training."""
        return {"spot": Spot(params, self.order), "chain": Chain(), "tree": ConfidenceTree()}

    def worse(self, figures: dict[str, Any]) -> bool:
        """Whether held-out figures of the drafter are below those of stale confidence."""
        return figures["next_commit"] < figures["highest_stale_confidence"]

    def save(self, directory: Path, params: Any, infos, train_sets, figures) -> None:
        """Stores the drafter with its description."""
        metadata = describe(infos, train_sets, figures)
        save_drafter(directory, params, self.order, metadata, dtype=STORED)


class Pairs(NamedTuple):
    """A batch of (point, depth) pairs. A row of weight 0 is filler."""

    points: Points
    depth: Values
    weight: Values


def take_pairs(traces: traces_lib.Traces, index: np.ndarray, depth: np.ndarray) -> Pairs:
    """Looks up points and pairs them with depths."""
    ones = np.ones(len(index), np.float32)
    return Pairs(take_points(traces, index), depth.astype(np.int32), ones)


class Question(NamedTuple):
    """What the network is asked and what is right.

    Attributes:
      features: `[B, L, F]`.
      masked: of the state `depth` true commits below the root.
      draws: what would be drawn there.
      stale: the rule's score from stale distributions, `[B, L]`.
      position: the position committed next, `[B]`.
      token: its token.
    """

    features: jax.Array
    masked: jax.Array
    draws: Draws
    stale: jax.Array
    position: jax.Array
    token: jax.Array


def question(pairs: Pairs, config: OrderConfig, sampling: Sampling, rule: Rule) -> Question:
    """Places each pair at its depth on the true path."""
    points = pairs.points
    context = context_of(points, sampling, rule)
    masked = future_state(points, pairs.depth).masked
    step, known = future_step(points)
    position = jnp.argmax(known & (step == pairs.depth[:, None]), axis=-1)
    counts = committed(masked)
    draws = coupled_draws(context, counts, config.num_alternatives)
    features = order_features(
        context.reading,
        draws.confidence,
        draws.lead,
        draws.place,
        points.read_masked,
        points.root_masked,
        masked,
    )
    return Question(
        features=features,
        masked=masked,
        draws=draws,
        stale=stale_score(context, draws, counts),
        position=position,
        token=jnp.take_along_axis(points.tokens, position[:, None], axis=-1)[:, 0],
    )


def order_loss(params, pairs: Pairs, *, config: OrderConfig, sampling: Sampling, rule: Rule):
    """Cross-entropy of the next (position, token); sums over the batch.

    Pairs whose token is none of the alternatives cannot be drafted: they count as wrong, and
    teach nothing.
    """
    asked = question(pairs, config, sampling, rule)
    draws = asked.draws
    scores: Any = OrderNetwork(config).apply({"params": params}, asked.features)
    log_probs = next_commit_log_probs(scores, asked.masked)
    here = jnp.arange(log_probs.shape[1])[None] == asked.position[:, None]
    right = here[..., None] & (draws.tokens == asked.token[:, None, None])
    found = jnp.any(right, axis=(1, 2))
    picked = jnp.sum(jnp.where(right, log_probs, 0.0), axis=(1, 2))
    by_position = jax.nn.logsumexp(log_probs, axis=-1)
    guess = jnp.argmax(by_position, axis=-1)
    weight = pairs.weight

    def share(hit):
        return jnp.sum(weight * hit)

    return -jnp.sum(weight * jnp.where(found, picked, 0.0)), {
        "count": jnp.sum(weight),
        "next_commit": share(guess == asked.position),
        "stale_token": share(jnp.any(right[..., 0], axis=-1)),
        "left_to_right": share(jnp.argmax(asked.masked, axis=-1) == asked.position),
        "highest_stale_confidence": share(
            jnp.argmax(jnp.where(asked.masked, asked.stale, -jnp.inf), axis=-1) == asked.position
        ),
    }


class Picker:
    """Draws (point, depth) pairs of one set of traces: every pass alike, depth d with a share
    proportional to `decay ** d`, and each from the reading that is for that depth."""

    def __init__(self, traces: traces_lib.Traces, decay: float):
        self.traces = traces
        self._decay = decay
        self._first = traces.depths[:, 0]
        end = np.minimum(traces.depths[:, 1], traces.future())
        self._share = 1 - decay ** np.maximum(end - self._first, 0)
        self._sum = np.cumsum(decay**self._first * self._share)

    def pick(self, rng: np.random.Generator, count: int) -> Pairs:
        """`count` pairs."""
        index = np.searchsorted(self._sum, rng.random(count) * self._sum[-1], side="right")
        below = np.log1p(-rng.random(count) * self._share[index]) / np.log(self._decay)
        return take_pairs(self.traces, index, self._first[index] + np.floor(below).astype(int))


def pair_stream(
    sets: Sequence[traces_lib.Traces], run: OrderTraining
) -> Iterator[tuple[int, Pairs]]:
    """Endless batches, each of one set of traces, all sets alike."""
    rng = np.random.default_rng(run.seed)
    pickers = [Picker(traces, run.depth_decay) for traces in sets]
    while True:
        which = int(rng.integers(len(sets)))
        yield which, pickers[which].pick(rng, run.batch)


def make_optimizer(run: OrderTraining) -> optax.GradientTransformation:
    """Muon on the kernels but the last, Adam on the rest."""

    def matrices(path, leaf):
        names = [k.key for k in path]
        if names[-1] != "kernel" or names[0] == "score":
            return None
        axes = tuple(range(leaf.ndim))
        inputs = 2 if "output" in names else 1
        return optax.contrib.MuonDimensionNumbers(axes[:inputs], axes[inputs:])

    return muon(
        run.learning_rate,
        steps=run.steps,
        warmup_steps=run.warmup_steps,
        decay_share=run.decay_share,
        dimensions=lambda params: jax.tree_util.tree_map_with_path(matrices, params),
    )


def evaluate(params, sets, infos, run: OrderTraining, num_pairs: int = 4096) -> list[dict]:
    """Held-out accuracies of each set, at depth 0 and over the depths of training."""
    results = []
    for traces, info in zip(sets, infos, strict=True):
        loss = jax.jit(run.loss(info))
        rng = np.random.default_rng(run.seed + 1)
        first = rng.permutation(np.flatnonzero((traces.future() > 0) & (traces.depths[:, 0] == 0)))
        picker = Picker(traces, run.depth_decay)
        for name in ("first", "all"):
            totals: dict[str, float] = {}
            for i in range(0, num_pairs // run.batch * run.batch, run.batch):
                if name == "first":
                    index = first[(i + np.arange(run.batch)) % len(first)]
                    pairs = take_pairs(traces, index, np.zeros(run.batch, int))
                else:
                    pairs = picker.pick(rng, run.batch)
                value, sums = loss(params, pairs)
                for key, x in (sums | {"loss": value}).items():
                    totals[key] = totals.get(key, 0.0) + float(x)
            count = totals.pop("count")
            line = name_of(info)
            results.append(
                line | {"depth": name} | {k: round(v / count, 4) for k, v in totals.items()}
            )
    return results


def name_of(info: traces_lib.TraceInfo) -> dict[str, Any]:
    """What tells traces apart."""
    rule, temperature = rule_name(info.rule), float(info.sampling.temperature)
    return {"target": info.target, "rule": rule, "temperature": temperature}


def split_blocks(traces: traces_lib.Traces, held_out: float):
    """Training and held-out traces; the same split for the same traces."""
    order = np.random.default_rng(0).permutation(len(traces.start))
    cut = max(int(len(order) * held_out), 1)
    return traces.select(np.sort(order[cut:])), traces.select(np.sort(order[:cut]))


def fit(run: OrderTraining, infos, train_sets, out: Path):
    """Fits or resumes under `out`; returns the parameters."""
    stream = pair_stream(train_sets, run)
    which, pairs = next(pair_stream(train_sets, run))
    params = jax.jit(functools.partial(run.init, info=infos[which]))(pairs)
    if run.start is not None:
        params = _started(run.start, params)
    optimizer = make_optimizer(run)
    steps = [parallel_step(run.loss(info), optimizer) for info in infos]

    def step(state, batch):
        which, pairs = batch
        return steps[which](state, pairs)

    state = run_steps(
        init_state(params, optimizer),
        total_steps=run.steps,
        batches=stream,
        step_for=lambda _: step,
        make_batch=lambda batch, _: (batch[0], split_batch(batch[1], jax.local_device_count())),
        out=out,
    )
    return state.params


def _started(directory: str, like: Any) -> Any:
    """Parameters of a drafter. Raises ValueError where they are shaped otherwise than `like`."""
    params = load_drafter(directory).params
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, like):
        raise ValueError(f"start: {directory} is a drafter of another shape")
    return params


def compare_passes(params, sets, infos, run: OrderTraining, budget: int = 16) -> list[dict]:
    """Held-out steps per pass beside the training-free drafters', by replay of plain decoding."""
    results = []
    for traces, info in zip(sets, infos, strict=True):
        if info.budget > 1:
            continue
        line = name_of(info) | {"budget": budget}
        for name, drafter in run.drafters(params).items():
            steps, passes = replay(drafter, traces, info, budget)
            line[name] = round(float(steps.sum() / passes.sum()), 3)
        results.append(line)
    return results


def describe(infos, train_sets, figures) -> dict:
    """The description that is stored with the drafter."""
    first = next(f for f in figures if f["depth"] == "first")
    names = ("left_to_right", "highest_stale_confidence")
    return {
        "block_lengths": sorted({i.block_length for i in infos}),
        "rule": infos[0].rule.score,
        "temperatures": sorted({float(i.sampling.temperature) for i in infos}),
        "trained_on": infos[0].target,
        "num_blocks": sum(len(t.start) for t in train_sets),
        "accuracy": {"drafter": first["next_commit"], **{n: first[n] for n in names}},
    }


def main(config: Path, traces: list[Path], out: Path, force: bool = False) -> None:
    """Fits a network, or resumes where `out` left off.

    Args:
      config: Python file that defines `DRAFTER`, an `OrderTraining` or a `SetTraining`.
      traces: directories made by `train.collect`.
      out: directory of checkpoints, metrics and, at the end, the drafter.
      force: exports a drafter even if it predicts worse than stale confidence does.
    """
    run = runpy.run_path(str(config))["DRAFTER"]
    infos, sets = zip(*(traces_lib.read_traces(d) for d in traces), strict=True)
    train_sets, test_sets = zip(*(split_blocks(t, run.held_out) for t in sets), strict=True)
    num_blocks = sum(len(t.start) for t in train_sets)
    if num_blocks < FEW_BLOCKS:
        print(f"warning: only {num_blocks} blocks to train on", file=sys.stderr)
    params = fit(run, infos, train_sets, out)
    # The figures are those of what is stored.
    params = jax.tree.map(lambda leaf: leaf.astype(STORED).astype(leaf.dtype), params)
    figures = evaluate(params, test_sets, infos, run)
    passes = compare_passes(params, test_sets, infos, run)
    text = json.dumps({"accuracy": figures, "steps_per_pass": passes}, indent=2)
    (out / "held_out.json").write_text(text + "\n")
    print(text)
    if any(map(run.worse, figures)) and not force:
        raise SystemExit(f"{out}: predicts worse than stale confidence; not exported (--force)")
    run.save(out / "drafter", params, infos, train_sets, figures)


if __name__ == "__main__":
    tyro.cli(main)
