"""Prompts of the families: their templates, trimmed, on tiny tokenizers with their special tokens.

LLaDA's template text is not published verified; its shape is.
"""

import json

import pytest
import tokenizers

from spot_jax import text
from tests import fixtures

LLADA = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLADA_MOE = (
    "{% for message in messages %}"
    "{{ '<role>' + ('HUMAN' if message['role'] == 'user' else message['role'] | upper)"
    " + '</role>' + message['content'] + '<|role_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)
# Qwen2.5: a system prompt of its own where none is given.
DREAM = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3: no system prompt, thoughts of earlier answers left out, a switch for thinking.
SDAR = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEADERS = ["<|startoftext|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>"]
# Name -> template, special tokens, mask, begin-of-text token.
FAMILIES = {
    "llada": (LLADA, [*HEADERS, "<|eot_id|>"], "<|mdm_mask|>", "<|startoftext|>"),
    "llada-moe": (LLADA_MOE, ["<|endoftext|>", "<|role_end|>"], "<|mask|>", None),
    "dream": (DREAM, [*CHATML, "<|beginoftext|>"], "<|mask|>", "<|beginoftext|>"),
    "sdar": (SDAR, CHATML, "<|MASK|>", None),
}
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes?"},
    {"role": "user", "content": "2+2"},
]
EXPECTED = {
    "llada": (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\nhm\n</think>\n\nYes?<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "llada-moe": (
        "<role>HUMAN</role>Hi<|role_end|>"
        "<role>ASSISTANT</role><think>\nhm\n</think>\n\nYes?<|role_end|>"
        "<role>HUMAN</role>2+2<|role_end|><role>ASSISTANT</role>"
    ),
    "dream": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>"
        "\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes?<|im_end|>\n"
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    ),
    "sdar": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    ),
}


def write(directory, family, *, opens=False, plain_mask=False, in_file=False):
    """A byte-level tokenizer with a family's tokens; returns the id of its mask.

    Args:
      directory: existing.
      family: key of `FAMILIES`.
      opens: whether the tokenizer itself puts the begin-of-text token first.
      plain_mask: whether the mask is an added token that is not marked special.
      in_file: whether the template is in chat_template.jinja, as newer versions write it.
    """
    template, special, mask, bos = FAMILIES[family]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(special)
    model.add_tokens([tokenizers.AddedToken(mask, special=not plain_mask)])
    if opens:
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, model.token_to_id(bos))]
        )
    model.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": special[-1], "bos_token": bos, "chat_template": template}
    if in_file:
        (directory / "chat_template.jinja").write_text(settings.pop("chat_template"))
    fixtures.write_json(directory / "tokenizer_config.json", settings)
    return model.token_to_id(mask)


def shown(codec, ids):
    """The ids as text, special tokens by their names."""
    return codec.tokenizer.decode(ids, skip_special_tokens=False)


def user(content):
    return [{"role": "user", "content": content}]


def controls(codec, ids):
    """The special tokens among the ids, in order."""
    names = codec.tokenizer.convert_ids_to_tokens(ids)
    return [name for name in names if name in codec.special]


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_familys_template(tmp_path, family, in_file):
    write(tmp_path, family, in_file=in_file)
    codec = text.load_codec(tmp_path)
    ids = text.encode_messages(codec, TALK)
    assert shown(codec, ids) == EXPECTED[family]
    # The same ids as one encoding of the rendered text, whose markup is the template's own.
    whole = codec.tokenizer.encode(EXPECTED[family], add_special_tokens=False)
    assert ids == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_no_markup_of_the_user_is_special(tmp_path, family):
    write(tmp_path, family)
    codec = text.load_codec(tmp_path)
    markup = "".join(codec.special)
    own = controls(codec, text.encode_messages(codec, user("x")))
    ids = text.encode_messages(codec, user(f"x{markup}y"))
    assert controls(codec, ids) == own and markup in shown(codec, ids)
    role = [{"role": f"user{markup}", "content": "x"}]
    hidden = text.encode_messages(codec, role)
    assert controls(codec, hidden) == own
    asked = text.encode_messages(codec, user(f"x{markup}y"), parse_special=True)
    # Their begin-of-text tokens too, since a template may put one anywhere.
    assert len(controls(codec, asked)) == len(own) + len(codec.special)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_that_the_tokenizer_calls_ordinary(tmp_path, family):
    mask_id = write(tmp_path, family, plain_mask=True)
    mask = FAMILIES[family][2]
    careless = text.load_codec(tmp_path)
    assert mask_id in text.encode_text(careless, f"a{mask}b")
    codec = text.load_codec(tmp_path, [mask_id, 10**6])
    assert mask in codec.special and len(codec.tokenizer) == len(careless.tokenizer)
    for ids in (
        text.encode_text(codec, f"a{mask}b"),
        text.encode_messages(codec, user(f"a{mask}b")),
    ):
        assert mask_id not in ids and f"a{mask}b" in shown(codec, ids)
    assert mask_id in text.encode_text(codec, f"a{mask}b", parse_special=True)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_one_begin_of_text_with_and_without_template(tmp_path, family, opens):
    write(tmp_path, family, opens=opens)
    codec = text.load_codec(tmp_path)
    bos = codec.tokenizer.bos_token_id
    assert codec.adds_bos == opens
    # LLaDA's template writes one itself; Dream's leaves it to the tokenizer.
    templated = text.encode_messages(codec, TALK)
    expected = int(opens or family == "llada")
    assert templated.count(bos) == expected and templated[:expected] == [bos] * expected
    raw = text.encode_text(codec, "hi")
    assert raw == [bos] * opens + codec.tokenizer.encode("hi", add_special_tokens=False)
    written = text.encode_text(codec, codec.tokenizer.bos_token + "hi", parse_special=True)
    assert written.count(bos) == 1 and written[0] == bos


def test_no_code_of_a_directory_is_run(tmp_path):
    write(tmp_path, "dream")
    trap = tmp_path / "trap"
    (tmp_path / "tokenization_dream.py").write_text(f"open({str(trap)!r}, 'w')\n")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
    }
    fixtures.write_json(tmp_path / "tokenizer_config.json", settings)
    codec = text.load_codec(tmp_path)
    assert shown(codec, text.encode_messages(codec, TALK)) == EXPECTED["dream"]
    # A slow tokenizer alone could be loaded only by that code.
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(text.TextError, match=r"tokenizer\.json .*needed"):
        text.load_codec(tmp_path)
    assert not trap.exists()


def test_a_template_cannot_reach_outside(tmp_path):
    write(tmp_path, "sdar")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    trap = tmp_path / "trap"
    settings["chat_template"] = (
        "{{ cycler.__init__.__globals__.os.system('touch " + str(trap) + "') }}"
    )
    fixtures.write_json(tmp_path / "tokenizer_config.json", settings)
    with pytest.raises(text.TextError, match="the chat template refuses the messages"):
        text.encode_messages(text.load_codec(tmp_path), user("hi"))
    assert not trap.exists()
