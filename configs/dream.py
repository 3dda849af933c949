"""A Dream-style target: full attention, q/k/v biases, each position read one row before.

python -m train.target --config configs/dream.py --out runs/dream --gsm8k gsm8k/train.jsonl

1500 of its steps were a whole run, decay included; the next 900, resumed from there, another, and
the rest a third.
"""

import dataclasses

from configs.home import TARGET as HOME
from train.target import TargetTraining

TARGET = TargetTraining(
    target=dataclasses.replace(
        HOME.target,
        num_layers=5,
        attention="full",
        grid="anchored",
        qk_norm=False,
        qkv_bias=True,
        shift=True,
        family="dream",
    ),
    start="spot_jax/zoo/home",
    phases=((32, 3600),),
    learning_rate=0.01,
    decay_share=0.7,
    tasks=("add", "two_step", "sort", "json") + ("function",) * 3,
    extra_share=0.04,
    tail=64,
    tokens_per_batch=5120,
)
