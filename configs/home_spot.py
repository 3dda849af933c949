"""The SPOT drafter of the bundled target.

    python -m train.collect --model home --out traces-t0 --num-prompts 1664 --gsm8k train.jsonl
    python -m train.collect --model home --out traces-t1 --num-prompts 896 --temperature 1 \\
        --seed 2000 --gsm8k train.jsonl
    python -m train.fit --config configs/home_spot.py --traces traces-t0 traces-t1 --out home-spot

Half an hour on two CPU cores. The shipped weights were fitted to traces of the target after 3100 of
its 3500 steps, first for 1600 steps with the rate falling over the last 60 %, then on to 2350
as below. Held out, at N = 16: 3.72 steps a pass at temperature 0, 3.73 at temperature 1; after 1600
steps it was 3.62 and 3.72. Its loss was still falling.
"""

from train.fit import OrderTraining

DRAFTER = OrderTraining(steps=2350, batch=320, learning_rate=0.02, decay_share=0.95)
