"""The reference samplers of the families, as rules and settings of ours.

A preset gives the reference's defaults. Where the reference has a fault, ours has not:

- SDAR's generate.py may overwrite the tail of the prompt, loops where the mask id is predicted, and
  divides by zero at temperature 0. Here prompts stay, the mask is never drawn, 0 is greedy.
- LLaDA's and Dream's samplers never stop early; a text ends at its end-of-text token here, and what
  is before it is the same. LLaDA draws in float64, Stable-DiffCoder and Fast-dLLM measure in
  float64; here both are float32. LLaDA's switches that suppress end-of-text tokens are
  `Sampling.suppressed`; guidance (`cfg_scale`) is not offered.
- Dream's schedule releases nothing in its first step or steps and averages its counts over the
  batch. Steps without a release change nothing and are left out, and rows are independent.
- Fast-dLLM's factor rule commits the last candidate even where it alone fails the test, and so the
  last two of a block always together; ours does not. Its sampler for LLaDA with DualCache is ours
  with `cache="dual"`, token for token. For Dream it commits the first position of a block alone,
  from the forward that fills the cache; ours ranks it with the others.
- Fast-dLLM v2 forgets a prompt of exactly one block, and loops where the mask id is predicted.
- `torch.topk` breaks ties in an unspecified way; here the lowest position is first.
"""

import difflib
from collections.abc import Sequence
from typing import NamedTuple, get_args

from spot_jax.commit import Rule, Score, Threshold, TopN
from spot_jax.config import Sampling
from spot_jax.forward import CacheKind
from spot_jax.rules import Factor, Release, SubBlocks


class Preset(NamedTuple):
    """A reference sampler; `source` says where its rule and defaults are from."""

    sampling: Sampling
    rule: Rule
    cache: CacheKind | None = None
    source: str = ""


PRESETS = (
    "sdar",
    "sdar-static",
    "sdar-sequential",
    "llada",
    "llada-random",
    "dream",
    "dream-maskgit",
    "dream-margin",
    "dream-entropy",
    "fast-dllm",
    "fast-dllm-factor",
    "fast-dllm-v2",
    "llada2",
    "diffcoder",
)
_DREAM: dict[str, Score] = {
    "dream-maskgit": "confidence",
    "dream-margin": "margin",
    "dream-entropy": "entropy",
}


def preset(
    name: str, block_length: int, steps: int | None = None, order_temperature: float = 0.0
) -> Preset:
    """A reference sampler by name, with the reference's defaults.

    Args:
      name: one of `PRESETS`.
      block_length: of the target. LLaDA's and Dream's pure form is one block as long as the answer.
      steps: per block, where the sampler has a schedule; the block length by default, which is one
        commit a step but in Dream's.
      order_temperature: Dream's `alg_temp`.

    Raises:
      ValueError: for an unknown name, or options that this sampler does not have.
    """
    scheduled = name in ("sdar-static", "llada", "llada-random", "dream", *_DREAM)
    if name not in PRESETS:
        raise ValueError(f"unknown sampler {name!r}" + nearest(name, PRESETS))
    if steps is not None and not scheduled:
        raise ValueError(f"sampler {name} has no number of steps")
    if order_temperature and name not in _DREAM:
        raise ValueError(f"sampler {name} draws no positions: no order temperature")
    steps = block_length if steps is None else steps
    greedy, raw = Sampling(), Sampling(confidence="raw")
    if name in _DREAM:
        counts = dream_schedule(block_length, steps)
        rule = TopN(counts, _DREAM[name], order_temperature)
        return Preset(greedy, rule, source="Dream, generation_utils.py, alg")
    if name == "dream":
        return Preset(greedy, Release(steps), source="Dream, generation_utils.py, alg=origin")
    if name in ("llada", "llada-random"):
        score: Score = "random" if name == "llada-random" else "confidence"
        rule = TopN(even_schedule(block_length, steps), score)
        return Preset(raw, rule, source="LLaDA, generate.py")
    if name == "sdar-static":
        rule = TopN(even_schedule(block_length, steps))
        return Preset(Sampling(temperature=1.0), rule, source="SDAR, low_confidence_static")
    return {
        "sdar": Preset(
            Sampling(temperature=1.0), Threshold(0.85), source="SDAR, low_confidence_dynamic"
        ),
        "sdar-sequential": Preset(
            Sampling(temperature=1.0), TopN(score="left_to_right"), source="SDAR, sequential"
        ),
        "fast-dllm": Preset(raw, Threshold(0.9, strict=False), "dual", "Fast-dLLM v1, threshold"),
        "fast-dllm-factor": Preset(raw, Factor(1.0), "dual", "Fast-dLLM v1, factor"),
        "fast-dllm-v2": Preset(greedy, SubBlocks(Threshold(1.0), 8), source="Fast-dLLM v2"),
        "llada2": Preset(greedy, Threshold(0.95), source="LLaDA2.0, modeling_llada2_moe.py"),
        "diffcoder": Preset(greedy, Threshold(0.95, strict=False), source="Stable-DiffCoder"),
    }[name]


def even_schedule(block_length: int, steps: int) -> int | tuple[int, ...]:
    """Commits of each step: `block_length // steps`, the remainder to the earliest steps."""
    if not 1 <= steps <= block_length:
        raise ValueError(f"steps must be in 1..{block_length}, the block length, got {steps}")
    each, more = divmod(block_length, steps)
    if not more:
        return each
    return tuple(each + (step < more) for step in range(steps))


def dream_schedule(length: int, steps: int, eps: float = 1e-3) -> int | tuple[int, ...]:
    """Commits of each step of Dream's schedule that commits anything.

    At time t of `linspace(1, eps, steps + 1)`, `int(masked * (1 - s / t))` positions are released,
    s being the next time, and all that are left at the last step.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    times = [1 + (eps - 1) * i / steps for i in range(steps + 1)]
    counts, left = [], length
    for step in range(steps):
        share = 1 - times[step + 1] / times[step]
        number = left if step == steps - 1 else int(left * share)
        counts += [number] if number else []
        left -= number
    return tuple(counts)


def parse_rule(name: str) -> Rule:
    """The commit rule that `--rule` names."""
    kind, _, value = name.partition(":")
    try:
        if kind == "threshold" and value:
            strict = not value.startswith(">=")
            return Threshold(float(value.removeprefix(">" if strict else ">=")), strict=strict)
        if kind == "n" and value:
            return TopN(int(value))
        if kind == "factor" and value:
            return Factor(float(value))
    except ValueError as error:
        raise ValueError(f"--rule {name}: {error}") from error
    known: dict[str, Score] = {score.replace("_", "-"): score for score in get_args(Score)}
    if name not in known:
        raise ValueError(
            f"--rule {name} is none of {', '.join(known)}, n:K, factor:F, threshold:P, "
            "threshold:>=P" + nearest(name, [*known, "threshold:0.9"])
        )
    return TopN(score=known[name])


def nearest(name: str, known: Sequence[str]) -> str:
    """A question for a message about an unknown name."""
    near = difflib.get_close_matches(name, known, 1, 0.0)
    return f": did you mean {near[0]}?" if near else ""
