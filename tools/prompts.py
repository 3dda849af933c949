"""Files of held-out prompts, one a task, for `spot-jax bench`.

python -m tools.prompts --out spot_jax/zoo/tasks
python -m tools.prompts --out runs/tasks --gsm8k gsm8k/test.jsonl
"""

import json
from pathlib import Path

import tyro

from train import curriculum


def main(out: Path, count: int = 100, seed: int = 7, gsm8k: Path | None = None) -> None:
    """Writes `TASK.jsonl` for each task.

    Args:
      out: directory.
      count: problems a task.
      seed: of the problems; those of `tools.quality` by default.
      gsm8k: its test lines, for a task of uncertain text; the first `count` are taken.
    """
    tasks = {t: curriculum.make_examples(seed, "test", count, (t,)) for t in curriculum.TASKS}
    if gsm8k is not None:
        tasks["gsm8k"] = curriculum.read_gsm8k(gsm8k)[:count]
    out.mkdir(parents=True, exist_ok=True)
    for task, examples in tasks.items():
        lines = (
            json.dumps({"id": f"{task}-{index}", "prompt": example.prompt})
            for index, example in enumerate(examples)
        )
        (out / f"{task}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
