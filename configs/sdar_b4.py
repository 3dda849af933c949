"""An SDAR-style target of block 4, one layer less than the bundled one, from its weights.

python -m train.target --config configs/sdar_b4.py --out runs/sdar-b4 --gsm8k gsm8k/train.jsonl
"""

import dataclasses

from configs.home import TARGET as HOME
from train.target import TargetTraining

TARGET = TargetTraining(
    target=dataclasses.replace(HOME.target, num_layers=5, block_length=4),
    start="spot_jax/zoo/home",
    phases=((4, 600),),
    learning_rate=0.01,
    decay_share=0.7,
    tasks=("add", "two_step", "sort", "json") + ("function",) * 3,
    extra_share=0.04,
)
