"""Decodes any number of prompts in batches of few shapes, and measures what that took."""

import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Key

from spot_jax.config import TargetConfig
from spot_jax.decode import DecodeConfig, decode
from spot_jax.draft import Drafter, Oracle
from spot_jax.models.target import TargetModel
from spot_jax.state import DecodeResult, Trace

NONE: Mapping[int, int] = types.MappingProxyType({})


class Answer(NamedTuple):
    """The outcome of one request.

    Attributes:
      tokens: exactly the answer, without the end-of-text token that closed it.
      stopped: whether an end-of-text token ended it.
      steps, passes, drafted, accepted: see `DecodeResult`.
      trace: of the positions behind the prompt, up to the end of the block of the last that it
        may have; it goes on behind the end of the answer.
      passes_at: passes at each size, where sizes are chosen by cost.
    """

    tokens: Int32[np.ndarray, " A"]
    stopped: bool
    steps: int
    passes: int
    drafted: int
    accepted: int
    trace: Trace
    passes_at: Mapping[int, int] = NONE


class Stats(NamedTuple):
    """Sums over requests; filler rows do not count.

    Attributes:
      seconds: from arguments to results, compilation left out.
      compile_seconds: tracing and compilation, or reading it from the cache.
      passes_at: see `Answer`.
    """

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0
    passes_at: Mapping[int, int] = NONE

    @property
    def steps_per_pass(self) -> float:
        return self.steps / max(self.passes, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Batch(NamedTuple):
    """Prompts that are decoded together, and the width they are padded to."""

    width: int
    indices: list[int]


OnBatch = Callable[[list[int], list[Answer]], None]


def generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    noise_keys: Key[Array, " R"],
    config: DecodeConfig,
    drafter: Drafter | None = None,
    *,
    batch_size: int = 16,
    on_batch: OnBatch | None = None,
    order_of: Sequence[Answer] | None = None,
) -> tuple[list[Answer], Stats]:
    """Decodes prompts of any lengths.

    A request's answer depends on its prompt and its key. Batches differ in shape only by the
    padded width of their prompts, so few programs are compiled, and none twice in a process.

    Args:
      target: see `decode`.
      prompts: token ids of each request.
      noise_keys: key of each request.
      config: see `decode`.
      drafter: see `decode`.
      batch_size: most rows decoded together.
      on_batch: called with the places and the answers of each batch, as soon as it is done.
      order_of: answers of plain decoding to the same requests, whose order of commits is drafted
        in the place of `drafter`: the oracle, the upper bound of every drafter.

    Returns:
      The answers in the order of the prompts, and what they took.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if noise_keys.shape != (len(prompts),):
        raise ValueError(f"noise_keys must be [{len(prompts)}] typed keys, got {noise_keys.shape}")
    for index, prompt in enumerate(prompts):
        problem = prompt_problem(prompt, target.config, config.max_new_tokens)
        if problem:
            raise ValueError(f"prompt {index}: {problem}")
    config = config.settled(target.config)
    if config.budget == 1:
        drafter = order_of = None
    num_rows = min(batch_size, max(len(prompts), 1))
    answers: dict[int, Answer] = {}
    stats = Stats(requests=len(prompts))
    for batch in plan_batches([len(p) for p in prompts], target.config.block_length, num_rows):
        # Rows that repeat a request end with it, so they cost no pass; they are dropped below.
        rows = (batch.indices + batch.indices[-1:] * num_rows)[:num_rows]
        padded = np.full((num_rows, batch.width), target.config.pad_id, np.int32)
        for row, index in enumerate(rows):
            padded[row, : len(prompts[index])] = prompts[index]
        lengths = [len(prompts[index]) for index in rows]
        arguments = (
            target,
            jnp.asarray(padded),
            jnp.asarray(lengths, jnp.int32),
            noise_keys[np.array(rows)],
            config,
            drafter if order_of is None else _oracle(order_of, rows, lengths, batch.width, config),
        )
        started = time.perf_counter()
        program = _compiled(arguments)
        compiled = time.perf_counter()
        result = jax.device_get(program(*arguments))
        ended = time.perf_counter()
        done = [
            _answer(result, row, lengths[row], config, target.config)
            for row in range(len(batch.indices))
        ]
        answers |= dict(zip(batch.indices, done, strict=True))
        stats = _add(stats, done, ended - compiled, compiled - started)
        if on_batch is not None:
            on_batch(batch.indices, done)
    return [answers[index] for index in range(len(prompts))], stats


def plan_batches(lengths: Sequence[int], block_length: int, num_rows: int) -> list[Batch]:
    """Groups prompts by width; what does not fill a batch waits for the next wider one.

    Widths are 1, 2, 3, 4, 6, 8, 12, ... blocks: at most half of a row is padding, and a few
    requests of any lengths are one batch.
    """
    widths = [_padded(length, block_length) for length in lengths]
    batches: list[Batch] = []
    waiting: list[int] = []
    for width in sorted(set(widths)):
        waiting += [index for index, other in enumerate(widths) if other == width]
        whole = len(waiting) // num_rows * num_rows
        batches += [Batch(width, waiting[i : i + num_rows]) for i in range(0, whole, num_rows)]
        waiting = waiting[whole:]
    if waiting:
        batches.append(Batch(max(widths), waiting))
    return batches


def prompt_problem(prompt: Sequence[int], target: TargetConfig, max_new_tokens: int) -> str | None:
    """Why a prompt cannot be decoded, or None."""
    if not len(prompt):
        return "the prompt is empty"
    outside = next((token for token in prompt if not 0 <= token < target.vocab_size), None)
    if outside is not None:
        return f"token id {outside} is outside the vocabulary of {target.vocab_size}"
    if len(prompt) + max_new_tokens > target.max_position:
        return (
            f"prompt of {len(prompt)} tokens and {max_new_tokens} new ones exceed the "
            f"{target.max_position} positions of the target"
        )
    return None


_jitted = jax.jit(decode)
_programs: dict[Any, jax.stages.Compiled] = {}


def _compiled(arguments) -> jax.stages.Compiled:
    """The program for arguments of these shapes, compiled ahead so that it can be timed apart."""
    leaves, structure = jax.tree.flatten(arguments)
    # A drafter may hold plain numbers, which are nowhere yet.
    signature = (structure, tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves))
    if signature not in _programs:
        _programs[signature] = _jitted.lower(*arguments).compile()
    return _programs[signature]


def _oracle(answers: Sequence[Answer], rows, lengths, width: int, config: DecodeConfig) -> Oracle:
    """The oracle of a batch: steps of the answers where they lie on the canvas."""
    longest = max(len(answers[index].trace.step) for index in rows)
    step = np.full((len(rows), width + max(longest, config.max_new_tokens)), -1, np.int32)
    for row, (index, length) in enumerate(zip(rows, lengths, strict=True)):
        known = answers[index].trace.step
        step[row, length : length + len(known)] = known
    return Oracle(jnp.asarray(step))


def _padded(length: int, block_length: int) -> int:
    blocks, power = -(-length // block_length), 1
    while power < blocks:
        power *= 2
    return (power * 3 // 4 if power * 3 // 4 >= blocks else power) * block_length


def _answer(
    result: DecodeResult, row: int, prompt_length: int, config: DecodeConfig, target: TargetConfig
) -> Answer:
    length, anchor = target.block_length, prompt_length if target.grid == "anchored" else 0
    end = anchor + -(-(prompt_length + config.max_new_tokens - anchor) // length) * length
    sizes = () if config.costs is None else config.costs.sizes
    passes_at = () if result.passes_at is None else result.passes_at[row].tolist()
    tokens = np.asarray(result.tokens[row, prompt_length:][: result.lengths[row]], np.int32)
    return Answer(
        tokens,
        stopped=bool(result.stopped[row]),
        steps=int(result.steps[row]),
        passes=int(result.passes[row]),
        drafted=int(result.drafted[row]),
        accepted=int(result.accepted[row]),
        trace=Trace(*(x[row, prompt_length:end] for x in result.trace)),
        passes_at=dict(zip(sizes, passes_at, strict=True)),
    )


def _add(stats: Stats, done: Sequence[Answer], seconds: float, compile_seconds: float) -> Stats:
    return stats._replace(
        tokens=stats.tokens + sum(len(answer.tokens) for answer in done),
        steps=stats.steps + sum(answer.steps for answer in done),
        passes=stats.passes + sum(answer.passes for answer in done),
        drafted=stats.drafted + sum(answer.drafted for answer in done),
        accepted=stats.accepted + sum(answer.accepted for answer in done),
        seconds=stats.seconds + seconds,
        compile_seconds=stats.compile_seconds + compile_seconds,
        passes_at={
            size: stats.passes_at.get(size, 0) + sum(answer.passes_at[size] for answer in done)
            for size in done[0].passes_at
        },
    )
