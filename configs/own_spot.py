"""A SPOT drafter of another target's own, from the bundled one: what `home-spot` gives up there.

    python -m train.collect --model spot_jax/zoo/NAME --out NAME-t0 --num-prompts 512 --seed 3000 \\
        --gsm8k train.jsonl
    python -m train.collect --model spot_jax/zoo/NAME --out NAME-t1 --num-prompts 256 --seed 4000 \\
        --temperature 1 --gsm8k train.jsonl
    python -m train.fit --config configs/own_spot.py --traces NAME-t0 NAME-t1 --out NAME-spot
"""

from train.fit import OrderTraining

DRAFTER = OrderTraining(
    start="spot_jax/zoo/home-spot", steps=500, batch=320, learning_rate=0.01, decay_share=0.7
)
