"""An SDAR-style target of block 8, one layer less than the bundled one, from its weights.

python -m train.target --config configs/sdar_b8.py --out runs/sdar-b8 --gsm8k gsm8k/train.jsonl
"""

import dataclasses

from configs.home import TARGET as HOME
from train.target import TargetTraining

TARGET = TargetTraining(
    target=dataclasses.replace(HOME.target, num_layers=5, block_length=8),
    start="spot_jax/zoo/home",
    phases=((8, 600),),
    learning_rate=0.01,
    decay_share=0.7,
    tasks=("add", "two_step", "sort", "json") + ("function",) * 3,
    extra_share=0.04,
)
