"""Families of targets, as data: which checkpoints they are, and where everything is in them.

A family is a row of `FAMILIES`. Remote code is never run: what a row does not say about a
checkpoint is read from its own JSON files, or is an error.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from spot_jax import checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One row of the family table.

    Attributes:
      architectures: names in `architectures` of config.json; the first is the one we write.
      model_types: names in `model_type`, consulted where `architectures` is absent.
      fields: field of `TargetConfig` -> key of config.json.
      defaults: value of a field whose key is absent. Without a default the key is required.
      fixed: fields of `TargetConfig` that are the same in every checkpoint of the family.
      required: key -> the values that mean the arithmetic of our trunk; absent or null is fine.
      weights: name of a tensor -> leaf of `models.target.param_shapes`. A number between dots is
        written `{}` and is an index on a leading axis of the leaf.
      harmless: regular expression of tensors that hold nothing learnt.
      vocab_size: of the real checkpoints; the three ids below apply to that vocabulary only.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    required: Mapping[str, tuple[Any, ...]]
    weights: Mapping[str, str]
    harmless: str
    vocab_size: int
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int

    def places(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name of every tensor of a model -> its leaf and its leading indices there."""
        result = {}
        for pattern, leaf in self.weights.items():
            if leaf in shapes:
                leading = shapes[leaf][: pattern.count("{}")]
                for index in itertools.product(*map(range, leading)):
                    result[pattern.format(*index)] = (leaf, index)
        return result


_QWEN_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position": "max_position_embeddings",
    "rms_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_QWEN_WEIGHTS = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
    "model.layers.{}.input_layernorm.weight": "layers_attention_norm",
    "model.layers.{}.self_attn.q_proj.weight": "layers_q",
    "model.layers.{}.self_attn.k_proj.weight": "layers_k",
    "model.layers.{}.self_attn.v_proj.weight": "layers_v",
    "model.layers.{}.self_attn.o_proj.weight": "layers_o",
    "model.layers.{}.self_attn.q_norm.weight": "layers_q_norm",
    "model.layers.{}.self_attn.k_norm.weight": "layers_k_norm",
    "model.layers.{}.post_attention_layernorm.weight": "layers_mlp_norm",
    "model.layers.{}.mlp.gate_proj.weight": "layers_gate",
    "model.layers.{}.mlp.up_proj.weight": "layers_up",
    "model.layers.{}.mlp.down_proj.weight": "layers_down",
}

SDAR = Family(
    name="sdar",  # and TraDo, which says that it is SDAR
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    fields=_QWEN_FIELDS,
    defaults={"max_position": 32768, "rms_eps": 1e-6, "tie_embeddings": False},
    fixed={"qk_norm": True},
    required={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "partial_rotary_factor": (1.0,),
        "quantization_config": (),
    },
    weights=_QWEN_WEIGHTS,
    harmless=r".*\.rotary_emb\.inv_freq",
    vocab_size=151936,
    mask_id=151669,
    eos_ids=(151645, 151643),
    pad_id=151643,
)

FAMILIES = (SDAR,)


def by_name(name: str) -> Family:
    """The family that a `TargetConfig` names."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise checkpoint.CheckpointError(f"unknown family {name!r}: supported are {_supported()}")


def find(config_json: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, by `architectures` first and `model_type` where that is absent.

    A name in `architectures` that is not known is never overruled by a known `model_type`: families
    of different arithmetic share model types.
    """
    architectures = config_json.get("architectures") or []
    model_type = config_json.get("model_type")
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
        if not architectures and model_type in family.model_types:
            return family
    raise checkpoint.CheckpointError(
        f"architectures {architectures} with model_type {model_type!r} is not supported: supported "
        f"are {_supported()}"
    )


def _supported() -> str:
    return ", ".join(f"{f.name} ({', '.join(f.architectures)})" for f in FAMILIES)
