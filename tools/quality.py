"""How good a target is, and how much its last reading says of the next step, task by task.

python -m tools.quality --model spot_jax/zoo/home --count 100
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tokenizers
import tyro
from rich.console import Console
from rich.table import Table

from spot_jax import convert, noise
from spot_jax.decode import DecodeConfig
from train import curriculum
from train.collect import collect_batch
from train.documents import pack_prompts
from train.tokenizer import encode_prompt


def measure(model: Path, count: int, seed: int, max_new_tokens: int, show: int):
    """Yields a task and shares: of right answers; of commits whose stale token was right, and
    whose position was the one of highest stale confidence."""
    target = convert.load_target(model)
    words = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    config = DecodeConfig(max_new_tokens=max_new_tokens)
    for task in curriculum.TASKS:
        examples = curriculum.make_examples(seed, "test", count, (task,))
        prompts, lengths = pack_prompts(
            [encode_prompt(words, e.prompt) for e in examples], target.config.block_length
        )
        keys = noise.request_keys(0, count)
        found, canvas, ends = collect_batch(target, prompts, jnp.asarray(lengths), keys, config)
        texts = [
            words.decode(canvas[i, lengths[i] : ends[i]].tolist(), skip_special_tokens=False)
            for i in range(count)
        ]
        right = [curriculum.is_right(e, t) for e, t in zip(examples, texts, strict=True)]
        for example, text in list(zip(examples, texts, strict=True))[:show]:
            print(f"--- {task}\n{example.prompt}\n>>> {text}", file=sys.stderr)
        order = np.where(found.root_masked, found.order[found.block], -1)
        known = np.flatnonzero((order >= 0).any(axis=1))
        order = np.where(order < 0, np.iinfo(order.dtype).max, order)[known]
        position = order.argmin(axis=1)
        stale = found.top_tokens[known, position, 0]
        masked = found.root_masked[known]
        surest = np.where(masked, found.top_log_probs[known, :, 0], -np.inf).argmax(axis=1)
        token = found.tokens[found.block[known], position]
        yield task, *map(np.mean, (right, stale == token, surest == position))


def main(
    model: Path, count: int = 100, seed: int = 7, max_new_tokens: int = 96, show: int = 0
) -> None:
    """Prints a table of held-out problems, decoded greedily one position a pass.

    Args:
      model: target directory.
      count: test problems a task.
      seed: of the problems.
      max_new_tokens: longest answer.
      show: answers a task to print on standard error.
    """
    table = Table("task", "right", "stale token right", "highest stale confidence right")
    for task, *shares in measure(model, count, seed, max_new_tokens, show):
        table.add_row(task, *(f"{share:.1%}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
