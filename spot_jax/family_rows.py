"""The table of families: which checkpoints they are, and where everything is in them."""

import dataclasses

from spot_jax.family import Family

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
    | {"qk_layernorm": (True,), "shared_expert_intermediate_size": (0, -1)}
    | {name: (1, 0, -1) for name in ("router_num_group", "n_group")}
    | {name: (1, 0, -1) for name in ("router_topk_group", "topk_group")},
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
