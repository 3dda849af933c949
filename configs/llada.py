"""A LLaDA-style target: full attention, no q/k norms, a tokenizer of its own.

python -m train.target --config configs/llada.py --out runs/llada --gsm8k gsm8k/train.jsonl

1500 of its steps were a whole run, decay included; the next 1500, resumed from there, another, and
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
        vocab_size=1280,
        num_token_ids=1280,
        family="llada",
    ),
    start="spot_jax/zoo/home",
    phases=((32, 4500),),
    learning_rate=0.01,
    decay_share=0.7,
    tasks=("add", "two_step", "sort", "json") + ("function",) * 3,
    extra_share=0.04,
    tail=64,
    tokens_per_batch=5120,
)
