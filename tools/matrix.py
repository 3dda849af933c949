"""Every drafter, budget and temperature on held-out prompts: equality first, then steps per pass.

    python -m tools.matrix --count 40 --out runs/matrix.jsonl
    python -m tools.matrix --out runs/matrix.jsonl --print-only

Cells that `--out` already holds are not run again.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import tyro
from rich.console import Console
from rich.table import Table

from spot_jax import bundled, convert, noise
from spot_jax.config import Sampling
from spot_jax.decode import DecodeConfig, decode
from spot_jax.draft import Chain, ConfidenceTree, Drafter, Oracle, RandomTree
from spot_jax.drafter_io import load_drafter
from spot_jax.state import DecodeResult
from train import curriculum
from train.documents import pack_prompts
from train.tokenizer import encode_prompt

DRAFTERS = ("chain", "tree", "spot", "oracle", "random")


def load_pair(model: Path | None, spot: Path | None, sharpness: float):
    """Target, tokenizer and drafters by name (None: the oracle); the bundled ones by default."""
    model = model or bundled.bundled_target()
    target = convert.load_target(model)
    drafters: dict[str, Drafter | None] = {
        "chain": Chain(),
        "tree": ConfidenceTree(sharpness),
        "spot": load_drafter(spot or bundled.bundled_drafter(), target.config),
        "oracle": None,
    }
    return target, tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")), drafters


class Batch(NamedTuple):
    """Prompts of one task."""

    prompts: np.ndarray
    lengths: np.ndarray
    keys: jax.Array


def task_batches(
    words, tasks, count: int, seed: int, block_length: int, split: str = "test"
) -> dict[str, Batch]:
    """`count` prompts a task, held-out ones; a request's key is its index over all tasks."""
    batches = {}
    for index, task in enumerate(tasks):
        examples = curriculum.make_examples(seed, split, count, (task,))
        prompts, lengths = pack_prompts(
            [encode_prompt(words, e.prompt) for e in examples], block_length
        )
        batches[task] = Batch(prompts, lengths, noise.request_keys(seed, count, index * count))
    return batches


def same_rows(a: DecodeResult, b: DecodeResult) -> np.ndarray:
    """Rows whose tokens and step traces agree."""
    tokens = np.all(np.asarray(a.tokens) == np.asarray(b.tokens), axis=1)
    return tokens & np.all(np.asarray(a.trace.step) == np.asarray(b.trace.step), axis=1)


def decode_parts(target, batch: Batch, config: DecodeConfig, drafter_of, size: int) -> DecodeResult:
    """`decode`, `size` rows at a time; `drafter_of` takes the slice of the rows."""
    parts = []
    for first in range(0, len(batch.lengths), size):
        rows = slice(first, first + size)
        prompts, lengths, keys = batch.prompts[rows], batch.lengths[rows], batch.keys[rows]
        parts.append(
            jax.device_get(
                decode(target, prompts, jnp.asarray(lengths), keys, config, drafter_of(rows))
            )
        )
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def run_cell(target, batch: Batch, plain: DecodeResult, name, drafter, budget, sampling, new, size):
    """Decodes one cell and compares it with plain decoding.

    The plain result comes from the one-node program. Rows that differ from it are compared once
    more with plain decoding through the cell's own compiled shape, which must agree to the bit.
    """
    config = DecodeConfig(max_new_tokens=new, budget=budget, sampling=sampling)

    def drafter_of(rows):
        return Oracle(jnp.asarray(plain.trace.step[rows])) if name == "oracle" else drafter

    found = decode_parts(target, batch, config, drafter_of, size)
    cross = same_rows(found, plain)
    equal = cross
    if not cross.all():
        shape = DecodeConfig(max_new_tokens=new, reference_shape=budget, sampling=sampling)
        reference = decode_parts(target, batch, shape, lambda rows: None, size)
        equal = same_rows(found, reference)
    return {
        "requests": len(batch.lengths),
        "equal": int(equal.sum()),
        "equal_across_shapes": int(cross.sum()),
        "steps": int(found.steps.sum()),
        "passes": int(found.passes.sum()),
        "passes_plain": int(plain.passes.sum()),
    }


def main(
    out: Path,
    count: int = 40,
    budgets: Sequence[int] = (2, 4, 8, 16, 32),
    temperatures: Sequence[float] = (0.0, 1.0),
    drafters: Sequence[str] = DRAFTERS,
    tasks: Sequence[str] = curriculum.TASKS,
    model: Path | None = None,
    spot: Path | None = None,
    sharpness: float = ConfidenceTree().sharpness,
    max_new_tokens: int = 96,
    seed: int = 7,
    batch_size: int = 4,
    print_only: bool = False,
) -> None:
    """Runs the missing cells and prints the tables.

    Args:
      out: JSON lines, one a cell; appended to.
      count: held-out prompts a task.
      budgets: states a pass.
      temperatures: of plain decoding.
      drafters: any of chain, tree, spot, oracle, random.
      tasks: of the curriculum.
      model: target directory; the bundled one by default.
      spot: drafter directory; the bundled one by default.
      sharpness: of the confidence tree.
      max_new_tokens: longest answer.
      seed: of problems and noise.
      batch_size: rows decoded together; on a CPU few are fastest, as done rows wait for the last.
      print_only: runs nothing.
    """
    cells = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(c["temperature"], c["task"], c["drafter"], c["budget"]) for c in cells}
    if not print_only:
        target, words, known = load_pair(model, spot, sharpness)
        known["random"] = RandomTree(jax.random.key(seed))
        batches = task_batches(words, tasks, count, seed, target.config.block_length)
        out.parent.mkdir(parents=True, exist_ok=True)
        for temperature in temperatures:
            sampling = Sampling(temperature=temperature)
            plain = {}
            for budget in budgets:
                for name in drafters:
                    for task, batch in batches.items():
                        if (temperature, task, name, budget) in done:
                            continue
                        if task not in plain:
                            config = DecodeConfig(max_new_tokens=max_new_tokens, sampling=sampling)
                            plain[task] = decode_parts(
                                target, batch, config, lambda rows: None, batch_size
                            )
                        cell = {
                            "temperature": temperature,
                            "task": task,
                            "drafter": name,
                            "budget": budget,
                        } | run_cell(
                            target,
                            batch,
                            plain[task],
                            name,
                            known[name],
                            budget,
                            sampling,
                            max_new_tokens,
                            batch_size,
                        )
                        cells.append(cell)
                        with open(out, "a") as file:
                            file.write(json.dumps(cell) + "\n")
                        print(json.dumps(cell), file=sys.stderr)
    for temperature in sorted({c["temperature"] for c in cells}):
        print_table([c for c in cells if c["temperature"] == temperature], temperature)


def print_table(cells, temperature: float) -> None:
    """Steps per pass by task, and how many requests were equal."""
    tasks = list(dict.fromkeys(c["task"] for c in cells))
    table = Table(
        "drafter", "N", *tasks, "all", "equal", title=f"steps per pass, T = {temperature}"
    )
    for budget in sorted({c["budget"] for c in cells}):
        for name in dict.fromkeys(c["drafter"] for c in cells):
            row = {c["task"]: c for c in cells if c["budget"] == budget and c["drafter"] == name}
            if not row:
                continue
            ratios = [row[t]["steps"] / row[t]["passes"] if t in row else None for t in tasks]
            whole = sum(c["steps"] for c in row.values()) / sum(c["passes"] for c in row.values())
            equal = sum(c["equal"] for c in row.values())
            total = sum(c["requests"] for c in row.values())
            shown = ["-" if x is None else f"{x:.2f}" for x in ratios]
            table.add_row(name, str(budget), *shown, f"{whole:.2f}", f"{equal}/{total}")
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
