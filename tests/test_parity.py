"""Logits against native classes of transformers under an explicit mask, family by family."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from spot_jax import convert
from spot_jax.config import RopeScaling
from spot_jax.models import attention, layers
from spot_jax.models.target import Target, head_weight
from tests import fixtures
from tests.test_families import tiny_config, write_family

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(1).integers(0, 300, (2, 21))
BLOCK = 8


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rewrite_config(directory, **changes):
    path = directory / "config.json"
    fixtures.write_json(path, json.loads(path.read_text()) | changes)


def write_qwen3(directory, **changes):
    """A random Qwen3 checkpoint as transformers saves it, made an SDAR one by its config."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=512,
        rope_theta=10000.0,
        initializer_range=0.2,
        eos_token_id=298,
        pad_token_id=296,
        **changes,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    rewrite_config(
        directory,
        architectures=["SDARForCausalLM"],
        model_type="sdar",
        block_size=BLOCK,
        mask_token_id=299,
    )


def torch_logits(directory, visible):
    """Reference logits `[B, T, V]` of a checkpoint under `visible [T, T]`."""
    rewrite_config(directory, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    model = transformers.Qwen3ForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    mask = np.where(visible, 0.0, np.finfo(np.float32).min).astype(np.float32)
    mask = np.broadcast_to(mask, (len(TOKENS), 1, *visible.shape))
    with torch.no_grad():
        return model(torch.tensor(TOKENS), attention_mask=torch.tensor(mask)).logits.numpy()


def our_logits(model, visible):
    """The same of our trunk."""
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    attend = attention.attend_masked(jnp.asarray(visible))
    variables = {"params": model.params}
    hidden, _ = Target(model.config).apply(variables, jnp.asarray(TOKENS), positions, attend)
    with jax.default_matmul_precision("highest"):
        return np.asarray(hidden @ head_weight(model.params).T)


def block_causal(length):
    """Who sees whom, by loops."""
    return np.array([[q // BLOCK >= k // BLOCK for k in range(length)] for q in range(length)])


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_transformers(tmp_path, tied):
    write_qwen3(tmp_path, tie_word_embeddings=tied)
    model = convert.load_target(tmp_path)
    assert model.config.tie_embeddings == tied
    visible = block_causal(TOKENS.shape[1])
    ours = our_logits(model, visible)
    np.testing.assert_allclose(ours, torch_logits(tmp_path, visible), rtol=0, atol=1e-5)
    # The comparison can fail: under a causal mask it does, by far.
    assert np.abs(ours - torch_logits(tmp_path, np.tril(visible))).max() > 1e-3


def test_transformers_reads_what_save_hf_writes(tmp_path):
    fixtures.write_hf(tmp_path / "in", scale=0.2)
    model = convert.load_target(tmp_path / "in")
    convert.to_hf(tmp_path / "in", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids("<|MASK|>") == model.config.mask_id
    visible = block_causal(TOKENS.shape[1])
    expected = torch_logits(tmp_path / "out", visible)
    np.testing.assert_array_equal(expected, torch_logits(tmp_path / "in", visible))
    np.testing.assert_allclose(our_logits(model, visible), expected, rtol=0, atol=1e-5)


def test_a_stored_head_that_differs_from_a_tied_embedding_is_used(tmp_path):
    """As transformers 5 does: it unties where both are stored and differ."""
    tensors = fixtures.write_hf(tmp_path, scale=0.2)
    rewrite_config(tmp_path, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="stored lm_head.weight is used"):
        model = convert.load_target(tmp_path)
    np.testing.assert_array_equal(model.params["head"], tensors["lm_head.weight"])
    visible = block_causal(TOKENS.shape[1])
    expected = torch_logits(tmp_path, visible)
    np.testing.assert_allclose(our_logits(model, visible), expected, rtol=0, atol=1e-5)


SIZES = dict(
    vocab_size=320, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=24, max_position_embeddings=512, rope_theta=10000.0,
    rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=None, pad_token_id=None,
)  # fmt: skip
MOE = SIZES | {"moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 3}
LLADA_NAMES = {
    r"model\.transformer\.wte": "model.embed_tokens",
    r"model\.transformer\.ln_f": "model.norm",
    r"model\.transformer\.ff_out": "lm_head",
    r"model\.transformer\.blocks\.(\d+)\.attn_norm": r"model.layers.\1.input_layernorm",
    r"model\.transformer\.blocks\.(\d+)\.ff_norm": r"model.layers.\1.post_attention_layernorm",
    r"model\.transformer\.blocks\.(\d+)\.attn_out": r"model.layers.\1.self_attn.o_proj",
    r"model\.transformer\.blocks\.(\d+)\.([qkv]_proj)": r"model.layers.\1.self_attn.\2",
    r"model\.transformer\.blocks\.(\d+)\.ff_proj": r"model.layers.\1.mlp.gate_proj",
    r"model\.transformer\.blocks\.(\d+)\.up_proj": r"model.layers.\1.mlp.up_proj",
    r"model\.transformer\.blocks\.(\d+)\.ff_out": r"model.layers.\1.mlp.down_proj",
}
LLADA2_NAMES = {
    r"model\.word_embeddings": "model.embed_tokens",
    r"(.*)\.attention\.dense": r"\1.self_attn.o_proj",
    r"(.*)\.attention\.query_layernorm": r"\1.self_attn.q_norm",
    r"(.*)\.attention\.key_layernorm": r"\1.self_attn.k_norm",
    r"(.*)\.mlp\.gate\.expert_bias": r"\1.mlp.gate.e_score_correction_bias",
}
# Family -> native class and configuration, its fields, and its names for the family's.
NATIVE = {
    "sdar": ("Qwen3", SIZES | {"head_dim": 8}, {}),
    "sdar-moe": ("Qwen3Moe", MOE | {"head_dim": 8, "norm_topk_prob": True}, {}),
    "llada": ("Llama", SIZES | {"num_key_value_heads": 4, "head_dim": 8}, LLADA_NAMES),
    "llada-moe": ("Qwen3Moe", MOE | {"head_dim": 8, "norm_topk_prob": False}, {}),
    "llada2": (
        "Glm4Moe",
        {k: v for k, v in SIZES.items() if k != "rope_theta"}
        | dict(
            head_dim=8, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3,
            n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5,
            first_k_dense_replace=1, norm_topk_prob=True, use_qk_norm=True, attention_bias=False,
            rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            },
        ),
        LLADA2_NAMES,
    ),
    "dream": ("Qwen2", SIZES, {}),
    "fast-dllm-v2": ("Qwen2", SIZES | {"tie_word_embeddings": True}, {}),
    "stable-diffcoder": ("Llama", SIZES | {"head_dim": 8}, {}),
}  # fmt: skip


def native_logits(name, directory, visible, **changes):
    """Logits of the native class with the weights of a family's checkpoint, under other names."""
    kind, fields, names = NATIVE[name]
    tensors = {}
    for key, value in safetensors.numpy.load_file(directory / "model.safetensors").items():
        if ".query_key_value." in key:
            for part, rows in zip("qkv", np.split(value, [32, 48]), strict=True):
                new = key.replace("attention.query_key_value", f"self_attn.{part}_proj")
                tensors[new] = np.ascontiguousarray(rows)
            continue
        for pattern, new in names.items():
            stem, dot, leaf = key.rpartition(".")
            if re.fullmatch(pattern, key):
                key = re.sub(pattern, new, key)
                break
            if re.fullmatch(pattern, stem):
                key = re.sub(pattern, new, stem) + dot + leaf
                break
        tensors[key] = value
    out = directory / "native"
    config = getattr(transformers, f"{kind}Config")(**fields | changes)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(out)
    safetensors.numpy.save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    model, info = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
        out, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    mask = np.where(visible, 0.0, np.finfo(np.float32).min).astype(np.float32)
    mask = np.broadcast_to(mask, (len(TOKENS), 1, *visible.shape))
    with torch.no_grad():
        return model(torch.tensor(TOKENS), attention_mask=torch.tensor(mask)).logits.numpy()


@pytest.mark.parametrize("name", NATIVE)
def test_families_equal_their_native_classes(name, tmp_path):
    write_family(name, tmp_path)
    model = convert.load_target(tmp_path)
    length = TOKENS.shape[1]
    full = model.config.attention == "full"
    visible = np.ones((length, length), bool) if full else block_causal(length)
    ours = our_logits(model, visible)
    np.testing.assert_allclose(ours, native_logits(name, tmp_path, visible), rtol=0, atol=2e-5)
    causal = native_logits(name, tmp_path, np.tril(visible))
    assert np.abs(ours - causal).max() > 1e-2, "a causal mask gives the same"


def test_transformers_loads_what_we_write_where_the_class_is_its_own(tmp_path):
    """Stable-DiffCoder says `llama`: its directory loads as it is, without remote code."""
    write_family("stable-diffcoder", tmp_path)
    visible = block_causal(TOKENS.shape[1])
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert type(model) is transformers.LlamaForCausalLM
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    mask = torch.tensor(np.where(visible, 0.0, np.finfo(np.float32).min).astype(np.float32))
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS), attention_mask=mask.expand(2, 1, -1, -1)).logits
    ours = our_logits(convert.load_target(tmp_path), visible)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=2e-5)


# Stated, since GLM-4-MoE takes half a head where the key is absent.
WHOLE_HEAD = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sdar-moe", {"norm_topk_prob": False}),
        ("llada-moe", {"norm_topk_prob": True}),
        ("llada2", {"routed_scaling_factor": 1.0}),
        ("llada2", {"topk_group": 4}),
        ("llada2", {"rope_parameters": WHOLE_HEAD}),
        ("stable-diffcoder", {"rope_theta": 500.0}),
    ],
)
def test_each_switch_of_the_trunk_is_seen_in_the_logits(name, changes, tmp_path):
    write_family(name, tmp_path)
    visible = block_causal(TOKENS.shape[1])
    ours = our_logits(convert.load_target(tmp_path), visible)
    assert np.abs(ours - native_logits(name, tmp_path, visible, **changes)).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("dream", r".*[qkv]_proj\.bias"),
        ("llada2", r".*\.expert_bias"),
        ("llada2", r".*\.shared_experts\..*"),
        ("sdar", r".*\.k_norm\.weight"),
    ],
)
def test_each_kind_of_tensor_is_seen_in_the_logits(name, key, tmp_path):
    write_family(name, tmp_path)
    visible = block_causal(TOKENS.shape[1])
    ours = our_logits(convert.load_target(tmp_path), visible)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    zeroed = {k: np.zeros_like(v) for k, v in tensors.items() if re.fullmatch(key, k)}
    assert zeroed
    safetensors.numpy.save_file(tensors | zeroed, path)
    assert np.abs(ours - native_logits(name, tmp_path, visible)).max() > 1e-3


SCALINGS = (
    RopeScaling(rope_type="linear", factor=4.0),
    RopeScaling(rope_type="llama3", factor=8.0, original_max_position=64),
    RopeScaling(rope_type="yarn", factor=4.0, original_max_position=64),
    RopeScaling(rope_type="yarn", factor=4.0, original_max_position=64, attention_factor=1.5),
)


def rope_parameters(scaling, theta):
    """The same in the words of transformers."""
    parameters = dataclasses.asdict(scaling) | {"rope_theta": theta}
    parameters["original_max_position_embeddings"] = parameters.pop("original_max_position")
    if scaling.rope_type != "yarn" or not scaling.attention_factor:
        del parameters["attention_factor"]
    return parameters


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling(scaling):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = dataclasses.replace(tiny_config("sdar"), head_dim=32, rope_scaling=scaling)
    frequency, magnitude = layers.rotary_frequencies(config)
    native = transformers.Qwen3Config(
        **SIZES | {"head_dim": 32, "rope_theta": None},
        rope_parameters=rope_parameters(scaling, config.rope_theta),
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling.rope_type](native, "cpu")
    np.testing.assert_allclose(frequency, expected.numpy(), rtol=1e-6)
    assert magnitude == pytest.approx(factor)
    plain, _ = layers.rotary_frequencies(dataclasses.replace(config, rope_scaling=None))
    assert np.abs(plain / frequency - 1).max() > 0.5


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling_in_the_logits(scaling, tmp_path):
    """The factor on cosines and sines too, which no frequency shows."""
    write_family("sdar", tmp_path)
    plain = convert.load_target(tmp_path)
    config = dataclasses.replace(plain.config, rope_scaling=scaling)
    visible = block_causal(TOKENS.shape[1])
    ours = our_logits(plain._replace(config=config), visible)
    changes = {"rope_theta": None, "rope_parameters": rope_parameters(scaling, config.rope_theta)}
    expected = native_logits("sdar", tmp_path, visible, **changes)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)
    assert np.abs(our_logits(plain, visible) - expected).max() > 1e-3
