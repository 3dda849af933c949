"""Frozen, validated configurations, registered static so that they travel through `jit`."""

import dataclasses

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Shape and identifiers of a target, whatever its family.

    Attributes:
      vocab_size: rows of the embedding table, padding rows included.
      num_token_ids: ids below this are real tokens; rows above are padding and never drawn.
      block_length: positions decoded together; the grid starts at absolute position 0.
      mask_id: placeholder token of positions that are not committed yet. Never drawn.
      eos_ids: tokens that end the text.
      pad_id: fills results beyond their end.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_length: int
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    num_token_ids: int
    max_position: int = 32768
    rope_theta: float = 1e6
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    qk_norm: bool = True
    family: str = "sdar"

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "block_length",
            "num_token_ids",
            "max_position",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.num_token_ids > self.vocab_size:
            raise ValueError(
                f"num_token_ids {self.num_token_ids} exceeds vocab_size {self.vocab_size}"
            )
        if not 0 <= self.mask_id < self.vocab_size:
            raise ValueError(f"mask_id {self.mask_id} is outside the vocabulary")
        if self.mask_id in self.eos_ids:
            raise ValueError(f"mask_id {self.mask_id} is also an end-of-text id")
