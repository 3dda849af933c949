"""The bundled SDAR-style target, block 32."""

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
    phases=((0, 1300), (4, 100), (8, 100), (16, 150), (32, 1850)),
    tasks=("add", "two_step", "sort", "json", "function", "function", "function"),
    extra_share=0.04,
)
