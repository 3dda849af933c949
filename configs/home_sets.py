"""The SPOT-Sets drafter of the bundled target: thresholds 0.9 and 0.8, temperatures 0 and 1.

    for p in 0.9 0.8; do
      python -m train.collect --model home --out sets-$p-t0 --rule threshold:$p \\
          --num-prompts 2048 --seed 3000 --gsm8k train.jsonl --gsm8k-share 0.4
      python -m train.collect --model home --out sets-$p-t1 --rule threshold:$p --temperature 1 \\
          --num-prompts 2048 --seed 4000 --gsm8k train.jsonl --gsm8k-share 0.4
    done
    python -m train.fit --config configs/home_sets.py \\
        --traces sets-0.9-t0 sets-0.8-t0 sets-0.9-t1 sets-0.8-t1 --out home-sets

The figures are in `home-sets/held_out.json`; the drafter is `home-sets/drafter`. A threshold block
has few steps to learn from, so that GSM8K, of which the target is less sure, has a larger share
than in the traces of single commits.
"""

from train.fit_sets import SetTraining

DRAFTER = SetTraining(steps=2400, batch=256, learning_rate=0.02, decay_share=0.6)
