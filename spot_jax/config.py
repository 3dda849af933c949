"""Frozen, validated configurations, registered static so that they travel through `jit`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in the place of a feed-forward.

    Attributes:
      num_experts: experts of a layer.
      top_k: experts that a token goes through.
      intermediate_size: width of one expert.
      router: `softmax` over all experts (Qwen3-MoE, LLaDA-MoE), or `sigmoid` of each (LLaDA2).
      renormalise: divides the chosen experts' weights by their sum.
      num_groups: experts are chosen inside the best `top_groups` of this many groups; a group's
        score is the sum of its two best experts'.
      top_groups: see `num_groups`.
      scale: factor on the routed output.
      bias: whether a learnt bias per expert takes part in the choice, though not in the weights.
      shared_size: width of the expert that every token goes through; 0 for none.
      first_dense: layers at the beginning that have a plain feed-forward.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    router: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    bias: bool = False
    shared_size: int = 0
    first_dense: int = 0

    def __post_init__(self):
        for name in ("num_experts", "top_k", "intermediate_size", "num_groups", "top_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"experts: {name} must be at least 1, got {getattr(self, name)}")
        _check_finite("experts: ", self)
        if self.router not in ("softmax", "sigmoid"):
            raise ValueError(f"experts: unknown router {self.router!r}")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"experts: {self.num_experts} experts do not divide into {self.num_groups} groups"
            )
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"experts: top_groups {self.top_groups} exceeds num_groups {self.num_groups}"
            )
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ValueError(f"experts: top_k {self.top_k} exceeds the experts there are")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretched rotary embedding, with the field names of `rope_parameters` in transformers 5."""

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0

    def __post_init__(self):
        if self.rope_type not in ("linear", "llama3", "yarn"):
            raise ValueError(f"rope scaling of type {self.rope_type!r} is not supported")
        if not self.factor >= 1:
            raise ValueError(f"rope scaling: factor must be at least 1, got {self.factor}")
        _check_finite("rope scaling: ", self)
        if self.rope_type != "linear" and self.original_max_position < 1:
            raise ValueError(f"rope scaling {self.rope_type}: original_max_position is missing")
        if self.rope_type == "llama3" and not 0 <= self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope scaling llama3: low_freq_factor {self.low_freq_factor} must be 0 or more "
                f"and below high_freq_factor {self.high_freq_factor}"
            )
        if self.rope_type == "yarn" and not (self.beta_fast > 0 and self.beta_slow > 0):
            raise ValueError("rope scaling yarn: beta_fast and beta_slow must be above 0")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Shape and identifiers of a target, whatever its family.

    Attributes:
      vocab_size: rows of the embedding table, padding rows included.
      num_token_ids: ids below this are real tokens; rows above are padding and never drawn.
      block_length: positions decoded together.
      mask_id: placeholder token of positions that are not committed yet. Never drawn.
      eos_ids: tokens that end the text.
      pad_id: fills results beyond their end.
      rotary_dim: leading dimensions of each head that are rotated; 0 for all.
      rope_scaling: stretches the rotary embedding; None leaves it as it is.
      qkv_bias: whether the query, key and value projections have biases.
      experts: mixture of experts, None for plain feed-forwards of `intermediate_size`.
      attention: `block_causal` sees own and earlier blocks, `full` the whole canvas.
      grid: where blocks start: at multiples of the block length (`absolute`; the tail of a prompt
        lies in the first block), or counted from the end of the prompt (`anchored`).
      shift: whether a position is predicted by the row of logits before it (Dream).
      hand_over: whether the first token of a block is drawn, by an autoregressive step, from the
        last row of the finished block (Fast-dLLM v2).
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
    rotary_dim: int = 0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    experts: Experts | None = None
    attention: Literal["block_causal", "full"] = "block_causal"
    grid: Literal["absolute", "anchored"] = "absolute"
    shift: bool = False
    hand_over: bool = False
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
        _check_finite("", self)
        if not (self.rope_theta > 0 and self.rms_eps >= 0):
            raise ValueError(
                f"rope_theta {self.rope_theta} must be above 0 and rms_eps {self.rms_eps} 0 or more"
            )
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
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim must be even and at most head_dim {self.head_dim}, got "
                f"{self.rotary_dim}"
            )
        if self.experts is not None and self.experts.first_dense >= self.num_layers:
            raise ValueError("experts: first_dense leaves no layer with experts")
        if self.attention not in ("block_causal", "full"):
            raise ValueError(f"unknown attention {self.attention!r}")
        if self.grid not in ("absolute", "anchored"):
            raise ValueError(f"unknown grid {self.grid!r}")
        if (self.attention == "full") != (self.grid == "anchored"):
            raise ValueError(
                f"attention {self.attention} on the {self.grid} grid: no family has it"
            )
        if self.attention == "block_causal" and self.shift != self.hand_over:
            raise ValueError("block-causal attention: shift and hand_over go together")
        if self.attention == "full" and self.hand_over:
            raise ValueError("hand_over needs block-causal attention")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TargetConfig":
        """The configuration whose `dataclasses.asdict` went through JSON.

        Raises TypeError or ValueError for fields that are unknown, absent or out of range.
        """
        given: dict[str, Any] = dict(fields)
        for name, kind in (("rope_scaling", RopeScaling), ("experts", Experts)):
            if given.get(name) is not None:
                given[name] = kind(**given[name])
        given["eos_ids"] = tuple(given.get("eos_ids", ()))
        return cls(**given)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn and how their confidence is measured.

    Attributes:
      temperature: 0 takes the most probable token and uses no noise at all.
      top_k: draws among the k most probable tokens (ties with the k-th included); 0 is off.
      top_p: draws among the most probable tokens that together reach this probability; 1 is off.
      confidence: `filtered` measures the drawn token after temperature and filters (SDAR, and at
        temperature 0 too Dream); `raw` before both (LLaDA).
      suppressed: tokens that are impossible, in what is drawn and in confidence. LLaDA's
        `logits_eos_inf` is its end of text here; `confidence_eos_eot_inf`, which is defined at
        temperature 0 only, is its end of text and its end of turn.
      reference_vocab: lets the mask id and padding rows take part in the distribution, and be
        drawn, as in the reference samplers; a drawn mask id stays in the text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    confidence: Literal["filtered", "raw"] = "filtered"
    suppressed: tuple[int, ...] = ()
    reference_vocab: bool = False

    def __post_init__(self):
        if any(number < 0 for number in self.suppressed):
            raise ValueError(f"suppressed token ids must be 0 or more, got {self.suppressed}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        # Beyond, float32 turns logits / temperature or its reciprocal into 0, infinity or NaN.
        if self.temperature and not 1e-6 <= self.temperature <= 1e6:
            raise ValueError(f"temperature must be 0 or in [1e-6, 1e6], got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.confidence not in ("filtered", "raw"):
            raise ValueError(f"confidence must be 'filtered' or 'raw', got {self.confidence!r}")

    @property
    def filters(self) -> bool:
        """Whether reading needs the whole sorted distribution of a position."""
        matters = self.temperature > 0 or self.confidence == "filtered"
        return matters and (self.top_k > 0 or self.top_p < 1)


def _check_finite(what: str, config: Any) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{what}{field.name} must be finite, got {value}")
