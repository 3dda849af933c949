"""The SPOT drafter of the bundled target."""

from train.fit import OrderTraining

DRAFTER = OrderTraining(steps=1600, batch=320, learning_rate=0.02)
