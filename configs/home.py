"""The bundled SDAR-style target, block 32, 2.1M parameters.

    python -m train.target --config configs/home.py --out runs/home --gsm8k gsm8k/train.jsonl

About 85 minutes on two CPU cores. Autoregressive first, then block diffusion with growing blocks;
the last 800 steps were added after looks at its answers, each on a rate that falls to 0 again. The
shipped weights saw the mixture change as they went: until step 2200 all five tasks alike and GSM8K
a tenth of the documents, until 3100 with sorting and functions twice as often and GSM8K 4 %, until
3500 with functions three times as often, and the mixture below from there on.

`python -m tools.quality --model spot_jax/zoo/home --count 100` then printed as right: add 92 %,
two_step 91 %, sort 86 %, json 98 %, function 99 %; stale token right at 99.5 % of commits or more.
After 3500 steps it was add 96, two_step 90, sort 84, json 98, function 89 %.
"""

from spot_jax.config import TargetConfig
from train.target import TargetTraining

TARGET = TargetTraining(
    target=TargetConfig(
        vocab_size=2048,
        num_token_ids=2048,
        hidden_size=160,
        num_layers=6,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=448,
        block_length=32,
        mask_id=3,
        eos_ids=(2, 0),
        pad_id=0,
        max_position=1024,
        rope_theta=10000.0,
        tie_embeddings=True,
    ),
    phases=((0, 1300), (4, 100), (8, 100), (16, 150), (32, 2250)),
    tasks=("add", "two_step", "sort", "json") + ("function",) * 5,
    extra_share=0.04,
)
