"""Families of targets, as data: which checkpoints they are, and where everything is in them.

A family is a row of `FAMILIES`. Remote code is never run: what a row does not say about a
checkpoint is read from its own JSON files, or is an error.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spot_jax import checkpoint


class Place(NamedTuple):
    """Where a tensor goes: its rows, in order, to these leaves at this index of each."""

    leaves: tuple[str, ...]
    index: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One row of the family table.

    Attributes:
      architectures: names in `architectures` of config.json; the first is the one we write.
      model_types: names in `model_type`, consulted where `architectures` is absent.
      own_model_type: whether the model type alone tells the family, whatever the architecture.
      marker: part of a name in `architectures` or `auto_map` that tells the family.
      fields: field of `TargetConfig` -> key of config.json, or several keys, of which the first
        present counts.
      expert_fields: the same for `Experts`; empty where there are none.
      defaults: value of a field whose key is absent. Without a default the key is required.
      fixed: fields of `TargetConfig` that are the same in every checkpoint of the family.
      fixed_experts: the same for `Experts`.
      rotary_share: of each head, where the config has no `partial_rotary_factor`.
      required: key -> the values that mean the arithmetic of our trunk; absent or null is fine.
      weights: name of a tensor -> leaf of `models.target.param_shapes`, in which a layer's leaf
        has no `layers_`; several leaves share the rows of one tensor. A number between dots is
        written `{}`: layer first, then expert.
      harmless: regular expression of tensors that hold nothing learnt.
      block_length: default; None where the user or the checkpoint must tell.
      vocab_sizes: of the real checkpoints; the three ids below apply to these vocabularies only.
      parity: what logits were compared with.
      unverified: what could not be checked.
      note: what is decoded in another way than the reference does.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    own_model_type: bool = False
    marker: str = ""
    fields: Mapping[str, str | tuple[str, ...]]
    expert_fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    fixed_experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rotary_share: float = 1.0
    required: Mapping[str, tuple[Any, ...]]
    weights: Mapping[str, str | tuple[str, ...]]
    harmless: str = r".*\.rotary_emb\.inv_freq"
    block_length: int | None = None
    vocab_sizes: tuple[int, ...]
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    parity: str
    unverified: str
    note: str = ""

    def places(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
        """Where every tensor of a model goes, by name."""
        result = {}
        for pattern, names in self.weights.items():
            names = (names,) if isinstance(names, str) else names
            if "{}" not in pattern:
                if names[0] in shapes:
                    result[pattern] = Place(names, ())
                continue
            for layer, leaves, index in _layers(names, shapes):
                leading = shapes[leaves[0]][1 : pattern.count("{}")]
                for rest in itertools.product(*map(range, leading)):
                    result[pattern.format(layer, *rest)] = Place(leaves, (index, *rest))
        return result


def _layers(names, shapes) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """Number of each layer that has these leaves, their full names, its index in its stack."""
    begin = 0
    for stack in ("first", "layers"):
        leaves = tuple(f"{stack}_{name}" for name in names)
        number = shapes.get(f"{stack}_mlp_norm", (0,))[0]
        if leaves[0] in shapes:
            for index in range(number):
                yield begin + index, leaves, index
        begin += number


_SIZES = {
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
_DEFAULTS = {"max_position": 32768, "rms_eps": 1e-6, "tie_embeddings": False}
# Where a family's configs leave these out, they follow from others.
_DERIVED = _DEFAULTS | {"head_dim": "hidden_size / num_heads", "num_kv_heads": "num_heads"}
_PLAIN = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "quantization_config": (),
}
_NO_BIAS = _PLAIN | {"attention_bias": (False,), "mlp_bias": (False,)}
_CHOICE = {"num_experts": "num_experts", "top_k": "num_experts_per_tok"}
_ALL_EXPERTS = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_OUTER = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
}
_ATTENTION = {
    "model.layers.{}.input_layernorm.weight": "attention_norm",
    "model.layers.{}.self_attn.q_proj.weight": "q",
    "model.layers.{}.self_attn.k_proj.weight": "k",
    "model.layers.{}.self_attn.v_proj.weight": "v",
    "model.layers.{}.self_attn.o_proj.weight": "o",
    "model.layers.{}.post_attention_layernorm.weight": "mlp_norm",
}
_QK_NORM = {
    "model.layers.{}.self_attn.q_norm.weight": "q_norm",
    "model.layers.{}.self_attn.k_norm.weight": "k_norm",
}
_QKV_BIAS = {
    "model.layers.{}.self_attn.q_proj.bias": "q_bias",
    "model.layers.{}.self_attn.k_proj.bias": "k_bias",
    "model.layers.{}.self_attn.v_proj.bias": "v_bias",
}
_MLP = {
    "model.layers.{}.mlp.gate_proj.weight": "gate",
    "model.layers.{}.mlp.up_proj.weight": "up",
    "model.layers.{}.mlp.down_proj.weight": "down",
}
_EXPERTS = {
    "model.layers.{}.mlp.gate.weight": "router",
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "experts_gate",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "experts_up",
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "experts_down",
}
_LLAMA = _OUTER | _ATTENTION | _MLP
_QWEN2 = _LLAMA | _QKV_BIAS
_QWEN3 = _LLAMA | _QK_NORM
_QWEN3_MOE = _OUTER | _ATTENTION | _QK_NORM | _EXPERTS
_ANCHORED = {"attention": "full", "grid": "anchored"}

SDAR = Family(
    name="sdar",  # and TraDo, which says that it is SDAR
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    fields=_SIZES,
    defaults=_DEFAULTS,
    fixed={"qk_norm": True},
    required=_NO_BIAS,
    weights=_QWEN3,
    vocab_sizes=(151936,),
    mask_id=151669,
    eos_ids=(151645, 151643),
    pad_id=151643,
    parity="transformers Qwen3ForCausalLM, block mask",
    unverified="no real checkpoint was run; configs of b8 to b64 and of TraDo field by field",
)
A2D_QWEN3 = dataclasses.replace(
    SDAR,
    name="a2d-qwen3",
    architectures=("A2DQwen3LMHeadModel",),
    model_types=("a2d-qwen3",),
    own_model_type=True,
    # The mask was added to the vocabulary at an id that only the checkpoint knows.
    vocab_sizes=(),
    required=_NO_BIAS | {"loophole_enabled": (False,)},
    parity="as SDAR",
    unverified="no real config was seen; that a checkpoint is one of block diffusion",
    note="blocks start at multiples of the block length; its sampler pads prompts to end at one",
)
SDAR_MOE = dataclasses.replace(
    SDAR,
    name="sdar-moe",
    architectures=("SDARMoeForCausalLM",),
    model_types=("sdar_moe",),
    expert_fields=_CHOICE
    | {"intermediate_size": "moe_intermediate_size", "renormalise": "norm_topk_prob"},
    required=_NO_BIAS | _ALL_EXPERTS,
    weights=_QWEN3_MOE,
    parity="transformers Qwen3MoeForCausalLM, block mask",
    unverified="no real config was seen",
)
LLADA = Family(
    name="llada",  # LLaDA-8B and LLaDA-1.5
    architectures=("LLaDAModelLM",),
    model_types=("llada",),
    fields={
        "vocab_size": ("embedding_size", "vocab_size"),
        "hidden_size": "d_model",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "num_kv_heads": "n_kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "mlp_hidden_size",
        "max_position": "max_sequence_length",
        "rms_eps": "rms_norm_eps",
        "tie_embeddings": "weight_tying",
    },
    defaults=_DERIVED | {"max_position": 4096, "rms_eps": 1e-5},
    fixed={"qk_norm": False} | _ANCHORED,
    required={
        "activation_type": ("silu",),
        "block_type": ("llama",),
        "layer_norm_type": ("rms",),
        "rope": (True,),
        "include_bias": (False,),
        "include_qkv_bias": (False,),
        "bias_for_layer_norm": (False,),
        "attention_layer_norm": (False,),
        "input_emb_norm": (False,),
        "scale_logits": (False,),
        "alibi": (False,),
        "multi_query_attention": (False,),
        "clip_qkv": (),
        "quantization_config": (),
    },
    weights={
        "model.transformer.wte.weight": "embed",
        "model.transformer.ln_f.weight": "norm",
        "model.transformer.ff_out.weight": "head",
        "model.transformer.blocks.{}.attn_norm.weight": "attention_norm",
        "model.transformer.blocks.{}.q_proj.weight": "q",
        "model.transformer.blocks.{}.k_proj.weight": "k",
        "model.transformer.blocks.{}.v_proj.weight": "v",
        "model.transformer.blocks.{}.attn_out.weight": "o",
        "model.transformer.blocks.{}.ff_norm.weight": "mlp_norm",
        "model.transformer.blocks.{}.ff_proj.weight": "gate",
        "model.transformer.blocks.{}.up_proj.weight": "up",
        "model.transformer.blocks.{}.ff_out.weight": "down",
    },
    block_length=32,
    vocab_sizes=(126464,),
    mask_id=126336,
    eos_ids=(126081, 126348),
    pad_id=126081,
    parity="transformers LlamaForCausalLM, full mask",
    unverified="no real checkpoint was run",
)
LLADA_MOE = Family(
    name="llada-moe",
    architectures=("LLaDAMoEModelLM",),
    model_types=("lladamoe",),  # Its own says `llada`, which is another architecture's.
    fields=_SIZES,
    expert_fields=_CHOICE | {"intermediate_size": "expert_intermediate_size"},
    # No plain feed-forward; and the values that the class would fill in are placeholders.
    defaults={"intermediate_size": 1, "tie_embeddings": False}
    | {name: _DERIVED[name] for name in ("head_dim", "num_kv_heads")},
    fixed={"qk_norm": True} | _ANCHORED,
    fixed_experts={"renormalise": False},
    required=_NO_BIAS
    | {"norm_topk_prob": (False,), "routed_scaling_factor": (1,), "clip_qkv": ()}
    | {"moe_router_enable_expert_bias": (False,), "moe_router_score_function": ("softmax",)}
    # -1 is what the class fills in.
    | {"qk_layernorm": (True,), "shared_expert_intermediate_size": (0, -1)},
    weights=_QWEN3_MOE,
    block_length=32,
    vocab_sizes=(157184,),
    mask_id=156895,
    eos_ids=(156892,),
    pad_id=156892,
    parity="transformers Qwen3MoeForCausalLM without renormalisation, full mask",
    unverified="no real config was seen: rope_theta, rms_norm_eps and max_position must be in it",
)
LLADA2 = Family(
    name="llada2",  # LLaDA2.0, and 2.1 with editing off
    architectures=("LLaDA2MoeModelLM",),
    model_types=("llada2_moe", "llada2_moe_veomni"),
    fields=_SIZES,
    expert_fields=_CHOICE
    | {
        "intermediate_size": "moe_intermediate_size",
        "renormalise": "norm_topk_prob",
        "num_groups": "n_group",
        "top_groups": "topk_group",
        "scale": "routed_scaling_factor",
        "bias": "moe_router_enable_expert_bias",
        "first_dense": "first_k_dense_replace",
        "num_shared": "num_shared_experts",
    },
    defaults=_DEFAULTS,
    fixed={"qk_norm": True},
    fixed_experts={"router": "sigmoid"},
    rotary_share=0.5,
    required=_PLAIN
    | {"use_bias": (False,), "use_qkv_bias": (False,), "score_function": ("sigmoid",)}
    | {"use_qk_norm": (True,), "use_rmsnorm": (True,), "router_dtype": ("fp32",)}
    | {"norm_head": (False,), "num_nextn_predict_layers": (0,)},
    weights={
        "model.word_embeddings.weight": "embed",
        "model.norm.weight": "norm",
        "lm_head.weight": "head",
        "model.layers.{}.input_layernorm.weight": "attention_norm",
        "model.layers.{}.attention.query_key_value.weight": ("q", "k", "v"),
        "model.layers.{}.attention.query_layernorm.weight": "q_norm",
        "model.layers.{}.attention.key_layernorm.weight": "k_norm",
        "model.layers.{}.attention.dense.weight": "o",
        "model.layers.{}.post_attention_layernorm.weight": "mlp_norm",
        "model.layers.{}.mlp.gate.expert_bias": "router_bias",
        "model.layers.{}.mlp.shared_experts.gate_proj.weight": "shared_gate",
        "model.layers.{}.mlp.shared_experts.up_proj.weight": "shared_up",
        "model.layers.{}.mlp.shared_experts.down_proj.weight": "shared_down",
    }
    | _MLP
    | _EXPERTS,
    block_length=32,
    vocab_sizes=(157184,),
    mask_id=156895,
    eos_ids=(156892,),
    pad_id=156892,
    parity="transformers Glm4MoeForCausalLM, block mask",
    unverified="no real checkpoint was run; id of <|role_end|>, config of 2.1-flash",
    note="tokens of LLaDA2.1 are never edited once committed",
)
DREAM = Family(
    name="dream",  # Dream, Dream-Coder, DiffuCoder
    architectures=("DreamModel",),
    model_types=("Dream",),
    fields=_SIZES,
    defaults=_DERIVED,
    fixed={"qk_norm": False, "qkv_bias": True, "shift": True} | _ANCHORED,
    required=_PLAIN,
    weights=_QWEN2,
    block_length=32,
    vocab_sizes=(152064,),
    mask_id=151666,
    eos_ids=(151643, 151645),
    pad_id=151643,
    parity="transformers Qwen2ForCausalLM, full mask, shifted by the caller",
    unverified="no real checkpoint was run; max_position of Dream-v0",
)
FAST_DLLM = Family(
    name="fast-dllm-v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_types=("Fast_dLLM_Qwen",),
    fields=_SIZES,
    defaults=_DERIVED,
    fixed={"qk_norm": False, "qkv_bias": True, "shift": True, "hand_over": True},
    required=_PLAIN,
    weights=_QWEN2,
    block_length=32,
    vocab_sizes=(151936, 152064),
    mask_id=151665,
    eos_ids=(151645,),
    pad_id=151643,
    parity="transformers Qwen2ForCausalLM, block mask, shifted by the caller",
    unverified="no real checkpoint was run",
)
DIFFCODER = Family(
    name="stable-diffcoder",
    architectures=("StableDiffcoderForCausalLM",),
    model_types=(),  # It says `llama`, which is no diffusion model.
    marker="diffcoder",
    fields=_SIZES,
    defaults=_DERIVED,
    fixed={"qk_norm": False},
    required=_NO_BIAS,
    weights=_LLAMA,
    block_length=4,
    vocab_sizes=(155136,),
    mask_id=5,
    eos_ids=(2,),
    pad_id=1,
    parity="transformers LlamaForCausalLM, block mask",
    unverified="no real checkpoint was run",
)

FAMILIES = (
    SDAR,
    SDAR_MOE,
    A2D_QWEN3,
    LLADA,
    LLADA_MOE,
    LLADA2,
    DREAM,
    FAST_DLLM,
    DIFFCODER,
)

# Models whose sampler remembers more than tokens, masks and the step, so that a state of the block
# does not determine the next one and there is nothing that a draft could be checked against; and
# one that no row covers. Searched in names and keys of config.json, and in the directory's name:
# LLaDA2.2 has the architecture of 2.0, the two kinds of a2d-qwen3 have one config.
_REFUSED = {
    r"diffusion_?gemma": "its canvas is re-noised and each step reads the previous prediction",
    r"wedlm": "it decodes under causal attention with reordered tokens",
    r"lfm2\w*block": "its canvas is uniform noise that steps overwrite",
    r"dreamon": "its steps insert and delete positions",
    r"llada-?2[._]2|\bdelete_token_id|\bsplit_token_id": "its steps insert and delete positions",
    r"a2d\b.*mdlm": "its attention is full, which is no block diffusion",
}


def by_name(name: str) -> Family:
    """The family that a `TargetConfig` names."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise checkpoint.CheckpointError(f"unknown family {name!r}: supported are {_supported()}")


def find(config_json: Mapping[str, Any], names: Sequence[str] = ()) -> Family:
    """The family of a checkpoint: by `architectures`, then `auto_map`, then `model_type`.

    A name in `architectures` that is not known is never overruled by a known `model_type`, but for
    one that is a family's own: families of different arithmetic share model types.

    Args:
      config_json: content of config.json.
      names: of the model, such as that of its directory.
    """
    architectures = _names(config_json, "architectures", list)
    mapped = _names(config_json, "auto_map", dict)
    model_type = config_json.get("model_type")
    classes = " ".join([*architectures, *mapped]).lower()
    what = f"architectures {architectures} with model_type {model_type!r}"
    keys = (key for key, value in config_json.items() if value is not None)
    said = " ".join([classes, str(model_type), *names, *keys]).lower()
    for pattern, reason in _REFUSED.items():
        if re.search(pattern, said):
            name = f" ({', '.join(names)})" * bool(names)
            raise checkpoint.CheckpointError(f"{what}{name} cannot be decoded exactly: {reason}")
    for family in FAMILIES:
        if family.marker and family.marker in classes:
            return family
    for given in (architectures, mapped):
        for family in FAMILIES:
            if any(name in family.architectures for name in given):
                return family
    for family in FAMILIES:
        if model_type in family.model_types and (not architectures or family.own_model_type):
            return family
    raise checkpoint.CheckpointError(f"{what} is not supported: supported are {_supported()}")


def _names(config_json: Mapping[str, Any], key: str, kind: type) -> list[str]:
    """Names of classes: a list of them, or `module.Class` by what loads it."""
    value = config_json.get(key)
    if value is None:
        return []
    if not isinstance(value, kind):
        raise checkpoint.CheckpointError(f"{key} of config.json must not be {value!r}")
    items = list(value.values()) if isinstance(value, dict) else value
    return [item.rpartition(".")[2] for item in items if isinstance(item, str)]


def _supported() -> str:
    return ", ".join(f"{f.name} ({', '.join(f.architectures)})" for f in FAMILIES)
