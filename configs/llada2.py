"""A LLaDA2-style target: block-causal, experts chosen by sigmoids beside a shared one, half of
each head rotated.

    python -m train.target --config configs/llada2.py --out runs/llada2 --gsm8k gsm8k/train.jsonl

800 of its steps were a whole run, decay included; the next 800, resumed from there, another, and
the rest a third. An hour on two CPU cores.
"""

import dataclasses

from configs.home import TARGET as HOME
from spot_jax.config import Experts
from train.target import TargetTraining

TARGET = TargetTraining(
    target=dataclasses.replace(
        HOME.target,
        num_layers=5,
        rotary_dim=16,
        experts=Experts(
            num_experts=4,
            top_k=2,
            intermediate_size=64,
            router="sigmoid",
            scale=2.0,
            shared_size=320,
        ),
        family="llada2",
    ),
    start="spot_jax/zoo/home",
    phases=((32, 3400),),
    learning_rate=0.01,
    decay_share=0.7,
    tasks=("add", "two_step", "sort", "json") + ("function",) * 3,
    extra_share=0.04,
)
