"""`spot-jax verify`."""

import dataclasses
import json
import math
from typing import Any

from spot_jax import compare
from spot_jax.commands import costs, report, setup
from spot_jax.commands.options import Verify
from spot_jax.generate import Answer, Stats, generate

STATUS = {"EQUAL": 0, "TIE": 0, "DIFFERENT": 1, "INCONCLUSIVE": 2}
# Decisions nearer than this fall either way by rounding, which differs between programs.
EPSILON = {"float32": 1e-4, "bfloat16": 5e-2}
PROMPTS = (
    "Tom has 12 apples and buys 7 more. How many apples does he have now?",
    "Write a Python function that doubles a number.",
    "Sort these numbers: 9, 3, 7, 1.",
    'Write a JSON record with the name "Ana" and the age 31.',
)


def run(options: Verify) -> int:
    """Decodes both ways and gives the verdict."""
    setup.check_seed(options.seed)
    job = costs.given(setup.prepare(options, PROMPTS), options)
    target, drafter = setup.load(job, options)
    keys = setup.sample_keys(options.seed, len(job.requests))
    job, drafter = costs.settle(job, options, target, drafter, len(job.prompts))
    # With look-ahead, or of several sizes, no plain program has the same shape.
    cross_shape = options.cross_shape or options.look_ahead or job.config.costs is not None
    reference = 0 if cross_shape or drafter is None else job.config.budget
    plain_config = dataclasses.replace(
        job.config, budget=1, costs=None, look_ahead=False, reference_shape=reference
    )
    runs: list[tuple[list[Answer], Stats]] = []
    for name, config, used in (
        ("plain", plain_config, None),
        (job.drafter, job.config, drafter),
    ):
        with report.progress(name, len(job.prompts)) as advance:
            runs.append(
                generate(
                    target,
                    job.prompts,
                    keys,
                    config,
                    used,
                    batch_size=options.batch_size,
                    on_batch=advance,
                )
            )
    (plain, plain_stats), (drafted, stats) = runs
    divergence = compare.first_divergence(
        plain,
        drafted,
        [len(prompt) for prompt in job.prompts],
        keys,
        job.config,
        target.config,
    )
    verdict = _verdict(divergence, stats, EPSILON[options.dtype])
    equal = sum(map(compare.same_answer, plain, drafted))
    result = {
        "verdict": verdict,
        "requests": stats.requests,
        "equal_requests": equal,
        "drafter": job.drafter,
        "budget": job.config.budget,
        "temperature": job.config.sampling.temperature,
        "dtype": options.dtype,
        "same_shape": not cross_shape,
        "drafted_states": stats.drafted,
        "accepted_states": stats.accepted,
        "passes_plain": plain_stats.passes,
        "passes": stats.passes,
        "steps": stats.steps,
        "tokens": stats.tokens,
        "first_divergence": None if divergence is None else _shown(job, divergence),
        "margin": _finite(divergence.margin) if divergence else None,
        "epsilon": EPSILON[options.dtype],
    }
    print(json.dumps(result, indent=2) if options.json else _sentence(result))
    return STATUS[verdict]


def _verdict(divergence: compare.Divergence | None, stats: Stats, epsilon: float) -> str:
    if divergence is not None:
        return "TIE" if divergence.margin < epsilon else "DIFFERENT"
    return "EQUAL" if stats.drafted else "INCONCLUSIVE"


def _shown(job: setup.Job, divergence: compare.Divergence) -> dict[str, Any]:
    return {
        "id": job.requests[divergence.request].id,
        "step": divergence.step,
        "position": divergence.position,
        "plain": divergence.plain,
        "drafted": divergence.drafted,
    }


def _sentence(result: dict[str, Any]) -> str:
    verdict, where = result["verdict"], result["first_divergence"]
    said = f"{result['passes_plain']} passes plain, {result['passes']} with {result['drafter']}"
    if verdict == "INCONCLUSIVE":
        said = "nothing was drafted, so nothing was checked"
    elif where is not None:
        said = (
            f"{result['equal_requests']} of {result['requests']} requests are equal; request "
            f"{where['id']!r} parts at step {where['step']}, position {where['position']}, margin "
            f"{'unknown' if result['margin'] is None else format(result['margin'], '.2g')} "
            f"(a tie is below {result['epsilon']:g})"
        )
    return f"{verdict}: {result['requests']} requests, {result['steps']} steps; {said}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
