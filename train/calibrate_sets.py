"""Calibrates a fitted set drafter to another target: four scalars from a few dozen blocks.

python -m train.collect --model other --out traces-other --rule threshold:0.9 --num-prompts 64
python -m train.calibrate_sets --drafter home-sets --traces traces-other --out other-sets
"""

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from spot_jax import drafter_io
from spot_jax.commit import Threshold, TopN
from spot_jax.draft import SpotSets
from spot_jax.models.order import OrderConfig
from spot_jax.models.sets import Scalars, SetScores, set_scores
from spot_jax.rule_io import rule_name
from train import traces as traces_lib
from train.fit import Pairs, take_pairs
from train.fit_sets import SetQuestion, question_log_prob, set_question
from train.replay import replay

MAX_BLOCKS, DEPTHS, STEPS = 50, 4, 60
# Strength of the pull to the identity, in observations: few blocks must not lead far astray.
PRIOR = 2.0


class Answers(NamedTuple):
    """What a drafter said, uncalibrated, and what was right, under one rule."""

    scores: SetScores
    asked: SetQuestion
    rule: TopN | Threshold


def fit_scalars(
    drafter: SpotSets,
    sets: Sequence[traces_lib.Traces],
    infos: Sequence[traces_lib.TraceInfo],
) -> Scalars:
    """The scalars under which the traces are likeliest.

    Args:
      drafter: its own scalars are not looked at.
      sets: traces of the new target, each with its `infos`. Of each the first `MAX_BLOCKS` blocks
        are read, at depths up to `DEPTHS`.
      infos: how they were made.

    Raises:
      ValueError: for traces without a step to foresee.
    """
    answers = []
    for traces, info in zip(sets, infos, strict=True):
        pairs = all_pairs(traces.select(np.arange(min(MAX_BLOCKS, len(traces.start)))))
        if not len(pairs.depth):
            raise ValueError(f"traces of {info.target} hold no step to foresee: collect more")
        asked, scores = _ask(drafter.params, pairs, drafter.config, info)
        answers.append(Answers(scores, asked, info.rule))
    return likeliest_scalars(answers)


def likeliest_scalars(answers: Sequence[Answers]) -> Scalars:
    """The scalars under which what was right is likeliest; few answers stay near the identity."""
    start = Scalars(*(jnp.float32(x) for x in Scalars()))

    def loss(scalars: Scalars):
        total = PRIOR / 2 * sum((a - b) ** 2 for a, b in zip(scalars, start, strict=True))
        for scores, asked, rule in answers:
            total -= jnp.sum(question_log_prob(scalars(scores, asked.drafted), asked, rule))
        return total

    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    @jax.jit
    def minimise(scalars):
        def step(carry, _):
            scalars, state = carry
            value, grad = value_and_grad(scalars, state=state)
            updates, state = optimizer.update(
                grad, state, scalars, value=value, grad=grad, value_fn=loss
            )
            return (optax.apply_updates(scalars, updates), state), None

        return jax.lax.scan(step, (scalars, optimizer.init(scalars)), length=STEPS)[0][0]

    return jax.tree.map(float, minimise(start))


def all_pairs(traces: traces_lib.Traces) -> Pairs:
    """Every point at every depth that its block has, up to `DEPTHS`."""
    future = np.minimum(traces.future(), DEPTHS)
    points = np.repeat(np.arange(len(future)), future)
    depth = np.arange(len(points)) - np.repeat(np.cumsum(future) - future, future)
    return take_pairs(traces, points, depth)


@functools.partial(jax.jit, static_argnames=("config", "info"))
def _ask(
    params, pairs: Pairs, config: OrderConfig, info: traces_lib.TraceInfo
) -> tuple[SetQuestion, SetScores]:
    asked = set_question(pairs, config, info.sampling, info.rule)
    return asked, set_scores(params, config, asked.features, asked.draws.confidence, info.rule)


def main(drafter: Path, traces: list[Path], out: Path, budget: int = 16) -> None:
    """Writes the drafter with its calibration, and prints what that changes.

    Args:
      drafter: directory of a set drafter.
      traces: directories made by `train.collect` on the new target.
      out: directory to write.
      budget: of the replay that shows the gain on blocks that were not read.
    """
    fitted = drafter_io.load_drafter(drafter)
    if not isinstance(fitted, SpotSets):
        raise ValueError(f"{drafter} is no spot-sets drafter: nothing to calibrate")
    infos, sets = zip(*(traces_lib.read_traces(d) for d in traces), strict=True)
    scalars = fit_scalars(fitted, sets, infos)
    metadata = drafter_io.description(drafter_io.read_metadata(drafter))
    metadata["calibration"] = scalars._asdict()
    note = f"calibrated to {', '.join(dict.fromkeys(info.target for info in infos))}"
    metadata["notes"] = "; ".join(x for x in (metadata.get("notes"), note) if x)
    drafter_io.save_drafter(out, fitted.params, fitted.config, metadata, kind="spot-sets")
    print(json.dumps(scalars._asdict(), indent=2))
    for part, info in zip(sets, infos, strict=True):
        rest = np.arange(MAX_BLOCKS, len(part.start))
        if not len(rest):
            print(f"{info.target}: no blocks left to show the gain on", file=sys.stderr)
            continue
        line: dict[str, str | float] = {"target": info.target, "rule": rule_name(info.rule)}
        for name, one in (("before", fitted), ("after", fitted._replace(scalars=scalars))):
            steps, passes = replay(one, part.select(rest), info, budget)
            line[name] = round(float(steps.sum() / passes.sum()), 3)
        print(json.dumps(line))


if __name__ == "__main__":
    tyro.cli(main)
