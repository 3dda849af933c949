"""The SPOT drafter of the bundled target."""

from train.fit import OrderTraining

DRAFTER = OrderTraining(steps=2350, batch=320, learning_rate=0.02, decay_share=0.95)
