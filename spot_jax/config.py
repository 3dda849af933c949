"""Frozen, validated configurations, registered static so that they travel through `jit`."""

import dataclasses
from typing import Literal

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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn and how their confidence is measured.

    Attributes:
      temperature: 0 takes the most probable token and uses no noise at all.
      top_k: draws among the k most probable tokens (ties with the k-th included); 0 is off.
      top_p: draws among the most probable tokens that together reach this probability; 1 is off.
      confidence: `filtered` measures the drawn token after temperature and filters (SDAR);
        `raw` before both (LLaDA). At temperature 0 both are the raw distribution.
      reference_vocab: lets the mask id and padding rows take part in the distribution, and be
        drawn, as in the reference samplers; a drawn mask id stays in the text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    confidence: Literal["filtered", "raw"] = "filtered"
    reference_vocab: bool = False

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.confidence not in ("filtered", "raw"):
            raise ValueError(f"confidence must be 'filtered' or 'raw', got {self.confidence!r}")

    @property
    def filters(self) -> bool:
        """Whether drawing needs the whole sorted distribution of a position."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)
