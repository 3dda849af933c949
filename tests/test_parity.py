"""Logits against the reference implementation: transformers' Qwen3 under an explicit mask."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spot_jax import convert
from spot_jax.models import attention
from spot_jax.models.target import Target, head_weight
from tests import fixtures

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
    convert.to_hf(model, tmp_path / "out", tokenizer_from=tmp_path / "in")
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
