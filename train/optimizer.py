"""The optimiser of both trainers: Muon on matrices, Adam on the rest."""

from collections.abc import Callable
from typing import Any

import optax


def muon(
    learning_rate: float,
    *,
    steps: int,
    warmup_steps: int,
    decay_share: float,
    dimensions: Callable[[Any], Any],
) -> optax.GradientTransformation:
    """Muon with linear warm-up, a plateau and linear decay to 0, gradients clipped to norm 1.

    Args:
      learning_rate: peak for matrices; Adam on the rest takes a tenth.
      steps: of the whole run.
      warmup_steps: at the beginning.
      decay_share: share of the steps, at the end, over which the rate falls.
      dimensions: from parameters to a tree that holds `MuonDimensionNumbers` at the matrices and
        None at the rest.
    """
    decay = int(steps * decay_share)

    def schedule(peak):
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, peak, warmup_steps),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, 0.0, decay),
            ],
            [warmup_steps, steps - decay],
        )

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule(learning_rate),
            adam_learning_rate=schedule(learning_rate / 10),
            weight_decay=0.01,
            muon_weight_dimension_numbers=dimensions,
        ),
    )
