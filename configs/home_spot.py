"""The SPOT drafter of the bundled target."""

from train.fit import OrderTraining

DRAFTER = OrderTraining(steps=2200)
