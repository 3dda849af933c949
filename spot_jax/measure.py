"""Measures what passes and drafts take on this device, as they run when texts are decoded."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spot_jax import noise
from spot_jax.decode import DecodeConfig, Request, advance, begin, draft
from spot_jax.draft import Drafter
from spot_jax.draft.tree import empty_tree
from spot_jax.models.target import TargetModel
from spot_jax.state import State

SIZES = (1, 2, 4, 8, 16, 32)
# Of one timing: long enough that starting it does not count, and at most this many passes.
SECONDS, MAX_PASSES = 0.05, 64


class Times(NamedTuple):
    """Seconds at each size.

    Attributes:
      evaluate: of a pass; at size 1 that of plain decoding.
      draft: by drafter, of growing a tree; what passes with drafting take beyond those without.
    """

    evaluate: list[float]
    draft: dict[str, list[float]]


def measure(
    target: TargetModel,
    config: DecodeConfig,
    drafters: Mapping[str, tuple[Drafter, int]],
    sizes: Sequence[int],
    num_rows: int,
    prompt_width: int,
) -> Times:
    """Measures passes at all `sizes` and, in turns with them, drafting by each of the drafters.

    Args:
      target: the target.
      config: how to decode; see `pass_seconds`.
      drafters: by name, each with the `num_top` that it reads.
      sizes: ascending from 1.
      num_rows: rows decoded together.
      prompt_width: tokens of the prompts.
    """
    runs = [(size, config.num_top, None) for size in sizes]
    runs[0] = (1, 2, None)  # Nothing reads more of a plain pass.
    for drafter, num_top in drafters.values():
        runs += [(size, num_top, drafter) for size in sizes[1:]]
    seconds = pass_seconds(
        target,
        [(dataclasses.replace(config, budget=n, num_top=top), drafter) for n, top, drafter in runs],
        num_rows,
        prompt_width,
    )
    evaluate, rest = seconds[: len(sizes)], seconds[len(sizes) :]
    draft = {}
    for name in drafters:
        with_it, rest = rest[: len(sizes) - 1], rest[len(sizes) - 1 :]
        more = [max(a - b, 0.0) for a, b in zip(with_it, evaluate[1:], strict=True)]
        draft[name] = [0.0, *more]
    return Times(evaluate, draft)


def pass_seconds(
    target: TargetModel,
    runs: Sequence[tuple[DecodeConfig, Drafter | None]],
    num_rows: int,
    prompt_width: int,
    repeats: int = 5,
) -> list[float]:
    """Median seconds of a pass, and of drafting the next tree where there is a drafter.

    Passes are those of decoding itself, many in one program, over the cache of a prompt of random
    tokens; compilation is left out, and the runs take turns.

    Args:
      target: the target.
      runs: of each the drafter and how to decode; without a drafter passes of `budget` slots of
        which only the root is in use, or plain decoding at 1. Costs and end-of-text tokens do not
        count. `max_new_tokens` is the room behind the prompt, and the same in all.
      num_rows: rows decoded together.
      prompt_width: tokens of the prompts.
      repeats: timings of each run.
    """
    random = np.random.default_rng(0)
    prompts = random.integers(0, target.config.num_token_ids, (num_rows, prompt_width))
    lengths = jnp.full(num_rows, prompt_width)
    room = runs[0][0].max_new_tokens
    request = Request(lengths, lengths + room, noise.request_keys(0, num_rows))
    first = dataclasses.replace(runs[0][0], budget=1, costs=None)
    loop = _begin(target, jnp.asarray(prompts, jnp.int32), request, first)
    programs = []
    for config, drafter in runs:
        config = dataclasses.replace(config, costs=None, stop_at_eos=False)
        run = functools.partial(_passes, target, request, config, drafter, loop)
        _seconds(run, 1)  # Compiles.
        count = int(np.clip(SECONDS / _seconds(run, 2) * 2, 2, MAX_PASSES))
        programs.append((run, count))
    timings = [[_seconds(run, count) / count for run, count in programs] for _ in range(repeats)]
    return [statistics.median(values) for values in zip(*timings, strict=True)]


def _seconds(run, count: int) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run(jnp.int32(count)))
    return time.perf_counter() - started


@jax.jit
def _begin(target, prompts, request, config):
    return begin(target, prompts, request, config)


@jax.jit
def _passes(target, request, config, drafter, loop, count):
    root = State(loop.tree.tokens[:, 0], loop.tree.masked[:, 0])
    loop = loop._replace(tree=empty_tree(root, config.num_slots))

    def one_pass(_, loop):
        return draft(config, drafter, *advance(target, config, request, loop))

    return jax.lax.fori_loop(0, count, one_pass, loop)
