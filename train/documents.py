"""Batches of tokenised documents, the same ones for the same seed, grouped by length."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from train.curriculum import TASKS, Example, make_examples
from train.tokenizer import PAD_ID, encode_document

POOL = 4000


class Documents(NamedTuple):
    """A batch of documents, padded to a whole number of blocks.

    Attributes:
      tokens: int32 `[rows, T]`, `PAD_ID` after the end.
      prompt_lengths: int32 `[rows]`.
      lengths: int32 `[rows]`, prompt and answer with its closing token; 0 in a filler row.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray


def batches(
    tokenizer: Tokenizer,
    *,
    seed: int,
    tokens_per_batch: int,
    block_length: int,
    max_length: int,
    tasks: Sequence[str] = TASKS,
    extra: Sequence[Example] = (),
    extra_share: float = 0.1,
    tail: int = 0,
) -> Iterator[Documents]:
    """Endless batches of about `tokens_per_batch` tokens.

    Args:
      tokenizer: see `train.tokenizer`.
      seed: the stream is a function of this alone.
      tokens_per_batch: rows times padded length.
      block_length: lengths are padded to a multiple of this.
      max_length: longer documents are left out.
      tasks: of the curriculum, drawn alike; name one twice to see it twice as often.
      extra: further examples (GSM8K), mixed in.
      extra_share: their share of the documents.
      tail: most tokens of padding behind a document, drawn alike, before its length is rounded up.
    """
    pool = 0
    while True:
        rng = np.random.default_rng((seed, pool))
        examples = make_examples(int(rng.integers(2**31)), "train", POOL, tasks)
        if extra:
            chosen = rng.integers(len(extra), size=int(POOL * extra_share))
            examples = examples[: POOL - len(chosen)] + [extra[i] for i in chosen]
        yield from _pool_batches(
            [encode_document(tokenizer, e) for e in examples],
            rng,
            tokens_per_batch,
            block_length,
            max_length,
            tail,
        )
        pool += 1


def _pool_batches(documents, rng, tokens_per_batch, block_length, max_length, tail):
    groups: dict[int, list] = {}
    for ids, prompt_length in documents:
        room = len(ids) + (int(rng.integers(tail + 1)) if tail else 0)
        padded = -(-room // block_length) * block_length
        if padded <= max_length:
            groups.setdefault(padded, []).append((ids, prompt_length))
    chunks = []
    for length, group in groups.items():
        rows = max(tokens_per_batch // length, 1)
        rng.shuffle(group)
        # A last partial chunk would be a batch of another shape, and a compilation.
        chunks += [(length, group[i : i + rows]) for i in range(0, len(group) - rows + 1, rows)]
    for index in rng.permutation(len(chunks)):
        yield pack(*reversed(chunks[index]))


def pack(documents: Sequence[tuple[Sequence[int], int]], length: int) -> Documents:
    """Pads `(ids, prompt_length)` pairs to `[len(documents), length]`."""
    tokens = np.full((len(documents), length), PAD_ID, np.int32)
    for row, (ids, _) in enumerate(documents):
        tokens[row, : len(ids)] = ids
    return Documents(
        tokens,
        np.array([p for _, p in documents], np.int32),
        np.array([len(ids) for ids, _ in documents], np.int32),
    )


def pack_prompts(
    prompts: Sequence[Sequence[int]], block_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as `[B, P]`, P a multiple of the block, and their lengths `[B]`."""
    width = -(-max(len(ids) for ids in prompts) // block_length) * block_length
    packed = pack([(ids, len(ids)) for ids in prompts], width)
    return packed.tokens, packed.lengths
