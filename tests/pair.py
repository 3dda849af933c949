"""A tiny random target with a tiny random drafter, in the place of the bundled pair."""

import json
from pathlib import Path

import numpy as np

from spot_jax import drafter_io
from spot_jax.models.order import OrderConfig
from tests import fixtures

ORDER = OrderConfig(
    num_top=8, num_alternatives=2, max_block=16, width=16, num_heads=2, num_layers=1, mlp_width=16
)
METADATA = {
    "block_lengths": [8],
    "rule": "confidence",
    "temperatures": [0.0, 1.0],
    "trained_on": "home",
    "num_blocks": 10,
    "accuracy": {"drafter": 0.5, "left_to_right": 0.1, "highest_stale_confidence": 0.3},
}


def random_params(
    config: OrderConfig = ORDER, seed: int = 0, kind: str = "spot"
) -> dict[str, np.ndarray]:
    """Parameters of a drafter's network by flat names."""
    random = np.random.default_rng(seed)
    shapes = drafter_io.param_shapes(config, kind)
    return {name: 0.1 * random.normal(size=shape) for name, shape in shapes.items()}


def write_pair(zoo: Path) -> None:
    """Writes `home`, `home-spot` and two files of `tasks` below `zoo`."""
    fixtures.write_hf(zoo / "home", scale=0.3, config={"num_hidden_layers": 1})
    drafter_io.save_drafter(zoo / "home-spot", random_params(), ORDER, METADATA)
    (zoo / "tasks").mkdir()
    for task, prompts in (("count", ["one two", "3 4"]), ("spell", ["abc", "x"])):
        lines = [json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(prompts)]
        (zoo / "tasks" / f"{task}.jsonl").write_text("".join(lines))
