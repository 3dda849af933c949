"""The table of families: published shapes and counts, dispatch, refusals, and both directions."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from spot_jax import convert, families, family_rows, hf_config, hf_weights, hf_write, noise
from spot_jax.checkpoint import CheckpointError
from spot_jax.config import Experts, RopeScaling, Sampling, TargetConfig
from spot_jax.decode import DecodeConfig, decode
from spot_jax.draft import ConfidenceTree
from spot_jax.models.target import TargetModel, num_params, param_shapes

QWEN3 = {
    "head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "attention_bias": False, "hidden_act": "silu",
    "max_position_embeddings": 32768, "use_sliding_window": False, "tie_word_embeddings": False,
    "eos_token_id": 151643, "block_size": 4,
}  # fmt: skip
QWEN2_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "max_position_embeddings": 32768, "hidden_act": "silu",
}  # fmt: skip
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "head_dim": 128,
    "num_key_value_heads": 4, "num_experts": 256, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "vocab_size": 157184, "rope_theta": 600000, "rope_scaling": None,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "use_bias": False, "use_qkv_bias": False,
    "tie_word_embeddings": False, "max_position_embeddings": 16384, "pad_token_id": 156892,
    "sliding_window": 4096, "use_sliding_window": False, "hidden_act": "silu",
}  # fmt: skip
# Published configurations, with the published numbers of parameters and of tensors.
PUBLISHED = {
    "SDAR-1.7B": (
        QWEN3 | {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "hidden_size": 2048,
                 "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                 "intermediate_size": 6144},
        2_031_739_904, 311,
    ),
    "SDAR-4B": (
        QWEN3 | {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "hidden_size": 2560,
                 "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 9728},
        4_411_424_256, 399,
    ),
    "SDAR-8B": (
        QWEN3 | {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "hidden_size": 4096,
                 "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 12288},
        8_190_735_360, 399,
    ),
    "SDAR-30B-A3B": (
        QWEN3 | {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe",
                 "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                 "num_key_value_heads": 4, "intermediate_size": 6144, "num_experts": 128,
                 "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": True,
                 "decoder_sparse_step": 1, "mlp_only_layers": []},
        30_532_122_624, 18_867,
    ),
    "LLaDA-8B": (
        {"architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": 4096, "n_layers": 32,
         "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288, "vocab_size": 126464,
         "embedding_size": 126464, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "max_sequence_length": 4096, "include_bias": False, "include_qkv_bias": False,
         "weight_tying": False, "scale_logits": False, "input_emb_norm": False,
         "block_type": "llama", "alibi": False, "mask_token_id": 126336, "eos_token_id": 126081,
         "pad_token_id": 126081, "activation_type": "silu", "layer_norm_type": "rms",
         "attention_layer_norm": False, "multi_query_attention": None, "rope": True},
        8_015_581_184, 291,
    ),
    "LLaDA-MoE-7B-A1B": (
        {"architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "hidden_size": 2048,
         "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
         "num_experts": 64, "num_experts_per_tok": 8, "expert_intermediate_size": 1024,
         "vocab_size": 157184, "rope_theta": 50000.0, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 8192, "tie_word_embeddings": False, "qk_layernorm": True,
         "moe_layer_freq": 16 * [1], "dense_intermediate_size": 8192, "routed_scaling_factor": 1},
        7_356_880_896, 16 * (8 + 1 + 3 * 64) + 3,
    ),
    "LLaDA2.0-mini": (
        LLADA2 | {"hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
                  "intermediate_size": 5120, "moe_intermediate_size": 512},
        16_255_643_392, 14_813,
    ),
    "LLaDA2.0-flash": (
        LLADA2 | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "intermediate_size": 9216, "moe_intermediate_size": 1024},
        102_889_705_216, 24_161,
    ),
    "Dream-7B": (
        QWEN2_7B | {"architectures": ["DreamModel"], "model_type": "Dream",
                    "mask_token_id": 151666, "pad_token_id": 151643, "eos_token_id": 151643},
        7_615_616_512, 339,
    ),
    "Fast-dLLM-v2-7B": (
        QWEN2_7B | {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen",
                    "bd_size": 32, "eos_token_id": 151645, "pad_token_id": 151645},
        7_615_616_512, 339,
    ),
    "Fast-dLLM-v2-1.5B": (
        QWEN2_7B | {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen",
                    "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
                    "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
                    "bd_size": 32},
        1_543_714_304, 338,
    ),
    "Stable-DiffCoder-8B": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
         "auto_map": {"AutoModelForCausalLM": "modeling_seed_diffcoder.SeedDiffcoderForCausalLM"},
         "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
         "vocab_size": 155136, "rope_theta": 500000.0, "rms_norm_eps": 1e-6,
         "tie_word_embeddings": False, "max_position_embeddings": 8192},
        8_250_462_208, 291,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    config_json, parameters, tensors = PUBLISHED[name]
    config = hf_config.target_config(config_json)
    assert num_params(config) == parameters
    assert len(families.by_name(config.family).places(param_shapes(config))) == tensors


def test_what_the_rows_say_of_published_models():
    config = {name: hf_config.target_config(row[0]) for name, row in PUBLISHED.items()}
    blocks = {name: c.block_length for name, c in config.items()}
    assert blocks["SDAR-8B"] == blocks["Stable-DiffCoder-8B"] == 4
    assert {blocks[n] for n in ("LLaDA-8B", "Dream-7B", "LLaDA2.0-mini", "Fast-dLLM-v2-7B")} == {32}
    full = {name for name, c in config.items() if c.attention == "full"}
    assert full == {"LLaDA-8B", "LLaDA-MoE-7B-A1B", "Dream-7B"}
    shifted = {name for name, c in config.items() if c.shift}
    assert shifted == {"Dream-7B", "Fast-dLLM-v2-7B", "Fast-dLLM-v2-1.5B"}
    assert {name for name, c in config.items() if c.hand_over} == shifted - {"Dream-7B"}
    masks = {name: c.mask_id for name, c in config.items()}
    assert masks["LLaDA-8B"] == 126336 and masks["Dream-7B"] == 151666
    assert masks["Fast-dLLM-v2-1.5B"] == 151665 and masks["Stable-DiffCoder-8B"] == 5
    assert config["LLaDA-8B"].eos_ids == (126081, 126348)
    mini = config["LLaDA2.0-mini"]
    assert mini.rotary_dim == 64 and mini.experts is not None
    assert (mini.experts.shared_size, mini.experts.num_groups, mini.experts.scale) == (512, 8, 2.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SDAR-8B", "LLaDA-8B", "Dream-7B", "LLaDA2.0-mini"])
def test_published_shapes_compile_without_weights(name):
    config = hf_config.target_config(PUBLISHED[name][0])
    params = {
        leaf: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for leaf, shape in param_shapes(config).items()
    }
    keys = jax.eval_shape(lambda: noise.request_keys(0, 2))
    decoding = DecodeConfig(max_new_tokens=32, budget=4, sampling=Sampling(temperature=1.0))
    lowered = jax.jit(decode).lower(
        TargetModel(params, config),
        jax.ShapeDtypeStruct((2, 32), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
        keys,
        decoding,
        ConfidenceTree(),
    )
    assert lowered.out_info.tokens.shape == (2, 64)


@pytest.mark.parametrize(
    ("config_json", "reason"),
    [
        ({"architectures": ["DiffusionGemmaForBlockDiffusion"]}, "re-noised"),
        ({"model_type": "diffusion_gemma"}, "re-noised"),
        ({"model_type": "wedlm"}, "reordered"),
        ({"architectures": ["Lfm2ForBlockDiffusion"]}, "uniform noise"),
        ({"architectures": ["DreamOnModel"], "model_type": "DreamOn"}, "insert and delete"),
        (LLADA2 | {"delete_token_id": 156900, "split_token_id": 156901}, "insert and delete"),
    ],
)
def test_samplers_with_hidden_state_are_refused_by_name(config_json, reason):
    with pytest.raises(CheckpointError, match=f"cannot be decoded exactly: .*{reason}"):
        families.find(config_json)


def test_what_only_a_directory_tells_is_refused_by_its_name():
    mini = PUBLISHED["LLaDA2.0-mini"][0]
    hf_config.target_config(mini, directory="/hub/LLaDA2.1-mini")
    for directory in (
        "/hub/LLaDA2.2-mini",
        "/hub/LLaDA2.2-flash-mine",
        "/hub/models--inclusionAI--LLaDA2.2-flash/snapshots/0",
        "/hub/inclusionAI_LLaDA2.2-flash",
    ):
        with pytest.raises(CheckpointError, match=r"LLaDA2.2-.* exactly: its steps insert"):
            hf_config.target_config(mini, directory=directory)
    dream = PUBLISHED["Dream-7B"][0]
    for directory in ("/hub/DreamOn-v0-7B", "/hub/dreamon"):
        with pytest.raises(CheckpointError, match="exactly: its steps insert"):
            hf_config.target_config(dream, directory=directory)
    a2d = QWEN3 | PUBLISHED["SDAR-4B"][0] | {"architectures": ["A2DQwen3LMHeadModel"]}
    a2d |= {"model_type": "a2d-qwen3", "mask_token_id": 151669}
    found = hf_config.target_config(a2d, directory="/hub/Qwen3-0.6B-diffusion-bd3lm-v0.1")
    assert (found.family, found.block_length, found.attention) == ("a2d-qwen3", 4, "block_causal")
    with pytest.raises(CheckpointError, match="attention is full"):
        hf_config.target_config(a2d, directory="/hub/Qwen3-0.6B-diffusion-mdlm-v0.1")
    with pytest.raises(CheckpointError, match="loophole_enabled True is not supported"):
        hf_config.target_config(a2d | {"loophole_enabled": True})
    with pytest.raises(CheckpointError, match="has no mask_token_id"):
        hf_config.target_config({k: v for k, v in a2d.items() if k != "mask_token_id"})


def test_names_that_only_mention_a_model_are_not_refused():
    """What counts is the configuration; the name does where it is that of the model itself."""
    for name, directory in (
        ("LLaDA2.0-mini", "/hub/my-llada2.2-test"),
        ("LLaDA2.0-mini", "/data/LLaDA2.2-flash/LLaDA2.0-mini"),
        ("SDAR-4B", "/hub/sdar-distilled-from-wedlm"),
        ("SDAR-4B", "/hub/LLaDA2.2-mini"),
        ("LLaDA-8B", "/hub/llada-vs-diffusion-gemma"),
        ("Dream-7B", "/hub/dreamonline"),
    ):
        hf_config.target_config(PUBLISHED[name][0], directory=directory)
    a2d = PUBLISHED["SDAR-4B"][0] | {"architectures": ["A2DQwen3LMHeadModel"]}
    a2d |= {"model_type": "a2d-qwen3", "mask_token_id": 151669}
    hf_config.target_config(a2d, directory="/hub/mdlm-against-bd3lm")


def test_tokens_that_edit_are_refused_wherever_they_are_said(tmp_path):
    """DreamOn has Dream's config.json; its generation_config.json tells."""
    write_family("dream", tmp_path)
    hf_config.read_target_config(tmp_path)
    for name in ("expand_token_id", "delete_token_id"):
        (tmp_path / "generation_config.json").write_text(json.dumps({name: 151667}))
        with pytest.raises(CheckpointError, match="exactly: its steps insert and delete"):
            hf_config.read_target_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"delete_token_id": None}))
    hf_config.read_target_config(tmp_path)


def test_the_first_known_architecture_counts():
    for first, second in itertools.permutations(
        ["LLaDAMoEModelLM", "SDARForCausalLM", "StableDiffcoderForCausalLM", "DreamModel"], 2
    ):
        for unknown in ([], ["Unknown"]):
            names = [*unknown, first, second]
            (expected,) = (f for f in family_rows.FAMILIES if first in f.architectures)
            assert families.find({"architectures": names}) is expected
            mapped = {"AutoModel": f"m.{first}", "AutoModelForCausalLM": f"m.{second}"}
            assert families.find({"auto_map": mapped}) is expected
    # `architectures` goes before `auto_map`.
    both = {"architectures": ["DreamModel"], "auto_map": {"AutoModel": "m.SDARForCausalLM"}}
    assert families.find(both) is family_rows.DREAM


def test_dispatch():
    llada = {"architectures": ["LLaDAMoEModelLM"], "model_type": "llada"}
    assert families.find(llada) is family_rows.LLADA_MOE
    assert families.find({"model_type": "llada"}) is family_rows.LLADA
    current = {"architectures": ["StableDiffcoderForCausalLM"], "model_type": "llama"}
    assert families.find(current) is family_rows.DIFFCODER
    a2d = {"architectures": ["AnyName"], "model_type": "a2d-qwen3"}
    assert families.find(a2d) is family_rows.A2D_QWEN3
    # `auto_map` comes before `model_type`, which here is another architecture's.
    mapped = {"AutoConfig": "configuration.LLaDAConfig", "AutoModel": "org/x--m.LLaDAMoEModelLM"}
    mapped |= {"AutoTokenizer": ["tokenization.Slow", None]}
    assert families.find({"auto_map": mapped, "model_type": "llada"}) is family_rows.LLADA_MOE
    # LFM2 that is no diffusion model is unknown, and not said to be one.
    lfm2 = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_dim": 8}
    with pytest.raises(CheckpointError, match="is not supported"):
        families.find(lfm2)
    for wrong in ({"architectures": "SDARForCausalLM"}, {"auto_map": ["m.SDARForCausalLM"]}):
        with pytest.raises(CheckpointError, match="of config.json must not be"):
            families.find(wrong)


BAD_CONFIGS = {
    "SDAR-30B-A3B": [
        ({"mlp_only_layers": [3]}, r"mlp_only_layers \[3\] is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported"),
        ({"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ({"num_experts_per_tok": 200}, "top_k 200 exceeds the experts there are"),
    ],
    "LLaDA-MoE-7B-A1B": [
        ({"rope_theta": None}, "has no rope_theta"),
        ({"rope_theta": -1}, "rope_theta must be positive"),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor must be in"),
        ({"moe_layer_freq": [0] + 15 * [1]}, "moe_layer_freq .* is not 1 for every layer"),
        ({"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias True is not"),
        ({"qk_layernorm": False}, "qk_layernorm False is not supported"),
        ({"router_num_group": 8}, "router_num_group 8 is not supported"),
        ({"router_topk_group": 4}, "router_topk_group 4 is not supported"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8 is not supported"),
    ],
    "LLaDA2.0-mini": [
        ({"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        ({"n_group": 7}, "256 experts do not divide into 7 groups"),
        ({"router_dtype": "bf16"}, "router_dtype 'bf16' is not supported"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1 is not supported"),
        ({"first_k_dense_replace": 20}, "first_dense leaves no layer with experts"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor must be a finite number"),
    ],
    "LLaDA-8B": [
        ({"block_type": "sequential"}, "block_type 'sequential' is not supported"),
        ({"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ({"n_heads": 31}, "hidden size 4096 is no multiple of 31 heads"),
    ],
    "Dream-7B": [({"block_size": 16, "block_length": 32}, "block length is unclear")],
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_arithmetic_that_is_not_ours_is_refused(name):
    for changes, message in BAD_CONFIGS[name]:
        with pytest.raises(CheckpointError, match=message):
            hf_config.target_config(PUBLISHED[name][0] | changes)


EXPERTS = Experts(num_experts=8, top_k=3, intermediate_size=12)
SIGMOID = Experts(
    num_experts=8, top_k=3, intermediate_size=12, router="sigmoid", num_groups=4, top_groups=2,
    scale=2.5, bias=True, shared_size=12, first_dense=1,
)  # fmt: skip


def tiny_config(name: str) -> TargetConfig:
    """A tiny target of a family."""
    family = families.by_name(name)
    experts = {"sdar-moe": EXPERTS, "llada2": SIGMOID}.get(name)
    if name == "llada-moe":
        experts = dataclasses.replace(EXPERTS, renormalise=False)
    return TargetConfig(
        vocab_size=320, num_token_ids=320, hidden_size=32, num_layers=3, num_heads=4,
        num_kv_heads=4 if name == "llada" else 2, head_dim=8, mask_id=299, eos_ids=(298, 296),
        intermediate_size=1 if name == "llada-moe" else 24, block_length=8, pad_id=296,
        max_position=512, rope_theta=10000.0, experts=experts, family=name,
        rotary_dim=4 if name == "llada2" else 0, tie_embeddings=name == "fast-dllm-v2",
        **family.fixed,
    )  # fmt: skip


def random_params(config: TargetConfig, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: (name.endswith("norm") + 0.2 * random.normal(size=shape)).astype(np.float32)
        for name, shape in param_shapes(config).items()
    }


def write_family(name, directory, **options):
    """A tiny random checkpoint of a family."""
    config = tiny_config(name)
    params = random_params(config)
    hf_write.save_hf(params, config, directory, **options)
    return config, params


NAMES = [family.name for family in family_rows.FAMILIES]


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, tmp_path):
    config, params = write_family(name, tmp_path / "hf")
    model = convert.load_target(tmp_path / "hf")
    assert model.config == config
    assert model.params.keys() == params.keys()
    for leaf, value in params.items():
        np.testing.assert_array_equal(model.params[leaf], value)
    # Through Orbax and back to Hugging Face form: the same bytes.
    convert.convert(tmp_path / "hf", tmp_path / "orbax")
    convert.to_hf(tmp_path / "orbax", tmp_path / "again")
    weights = [(tmp_path / d / "model.safetensors").read_bytes() for d in ("hf", "again")]
    assert weights[0] == weights[1]


def test_share_of_rotated_dimensions_where_the_config_has_none(tmp_path):
    mini = {k: v for k, v in PUBLISHED["LLaDA2.0-mini"][0].items() if k != "partial_rotary_factor"}
    assert hf_config.target_config(mini).rotary_dim == 64
    assert hf_config.target_config(mini | {"partial_rotary_factor": 1.0}).rotary_dim == 0
    whole = dataclasses.replace(tiny_config("llada2"), rotary_dim=0)
    hf_write.save_hf(random_params(whole), whole, tmp_path)
    assert convert.load_target(tmp_path).config == whole


def test_groups_of_one_are_no_groups():
    config_json = PUBLISHED["LLaDA-MoE-7B-A1B"][0]
    plain = hf_config.target_config(config_json)
    for number in (1, -1, None):
        said = {"router_num_group": number, "router_topk_group": number}
        assert hf_config.target_config(config_json | said) == plain


UNSAYABLE = {
    "part of a shared expert": (
        "llada2",
        {"experts": dataclasses.replace(SIGMOID, shared_size=18)},
        "experts.shared_size 18 would be read back as 12",
    ),
    "less than a shared expert": (
        "llada2",
        {"experts": dataclasses.replace(SIGMOID, shared_size=6)},
        "experts.shared_size 6 would be read back as 0",
    ),
    "a shared expert": (
        "sdar-moe",
        {"experts": dataclasses.replace(EXPERTS, shared_size=12)},
        "experts.shared_size 12 would be read back as 0",
    ),
    "another router": (
        "llada-moe",
        {"experts": dataclasses.replace(EXPERTS, router="sigmoid", renormalise=False)},
        "experts.router 'sigmoid' would be read back as 'softmax'",
    ),
    "a norm": ("llada", {"qk_norm": True}, "qk_norm True would be read back as False"),
}


@pytest.mark.parametrize("case", UNSAYABLE)
def test_what_no_config_of_the_family_says_is_not_written(tmp_path, case):
    name, changes, message = UNSAYABLE[case]
    config = dataclasses.replace(tiny_config(name), **changes)
    with pytest.raises(CheckpointError, match=f"family {name} cannot say .*: {message}"):
        hf_write.save_hf(random_params(config), config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_several_shared_experts(tmp_path):
    experts = dataclasses.replace(SIGMOID, shared_size=24)
    config = dataclasses.replace(tiny_config("llada2"), experts=experts)
    hf_write.save_hf(random_params(config), config, tmp_path)
    assert convert.load_target(tmp_path).config == config


def test_a_routers_bias_stays_float32(tmp_path):
    config, params = write_family("llada2", tmp_path / "hf", dtype="bfloat16")
    stored = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert stored["model.layers.1.mlp.gate.expert_bias"].dtype == np.float32
    convert.convert(tmp_path / "hf", tmp_path / "orbax")
    for directory in ("hf", "orbax"):
        model = convert.load_target(tmp_path / directory, dtype="bfloat16")
        assert model.params["layers_q"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            model.params["layers_router_bias"], params["layers_router_bias"]
        )
    assert hf_weights.plan_conversion(tmp_path / "hf").dtype == "bfloat16"


def test_experts_stored_as_one_tensor(tmp_path):
    config, params = write_family("sdar-moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    for layer in range(3):
        lead = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{lead}.{e}.{p}_proj.weight") for e in range(8)])
            for p in ("gate", "up", "down")
        )
        tensors[f"{lead}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{lead}.down_proj"] = down
    safetensors.numpy.save_file(tensors, path)
    model = convert.load_target(tmp_path)
    for leaf in ("layers_experts_gate", "layers_experts_up", "layers_experts_down"):
        np.testing.assert_array_equal(model.params[leaf], params[leaf])
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = np.zeros((7, 24, 32), np.float32)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.experts.7.gate_proj.weight is missing"
    ):
        convert.load_target(tmp_path)


@pytest.mark.parametrize("case", ["both", "odd"])
def test_fused_experts_that_do_not_fit(tmp_path, case):
    write_family("sdar-moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = np.zeros((8, 24 + (case == "odd"), 32), np.float32)
    if case == "odd":
        for expert in range(8):
            del tensors[f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"]
            del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"{name} \[8, 2[45], 32\] has no place"):
        convert.load_target(tmp_path)


def test_missing_rows_of_a_fused_tensor(tmp_path):
    write_family("llada2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = "model.layers.2.attention.query_key_value.weight"
    tensors[name] = tensors[name][:-8]
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[56, 32\], expected \[64, 32\]"):
        convert.load_target(tmp_path)


def test_both_spellings_of_rope(tmp_path):
    config_json = PUBLISHED["SDAR-8B"][0]
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    old = hf_config.target_config(config_json | {"rope_scaling": scaling})
    new = hf_config.target_config(
        {k: v for k, v in config_json.items() if k not in ("rope_theta", "rope_scaling")}
        | {"rope_parameters": scaling | {"rope_theta": 1e6}}
    )
    assert old == new
    assert old.rope_scaling == RopeScaling(
        rope_type="yarn", factor=4.0, original_max_position=32768
    )
    config = dataclasses.replace(tiny_config("sdar"), rope_scaling=old.rope_scaling)
    hf_write.save_hf(random_params(config), config, tmp_path)
    assert convert.load_target(tmp_path).config == config
    assert json.loads((tmp_path / "config.json").read_text())["rope_scaling"]["factor"] == 4.0
