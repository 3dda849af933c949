"""Byte-level BPE tokenizer of the small demonstration model, with ChatML markup."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train.curriculum import Example, make_examples

PAD, IM_START, IM_END, MASK, RESERVED = SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>", "<|reserved|>",
)  # fmt: skip
PAD_ID, IM_START_ID, IM_END_ID, MASK_ID, RESERVED_ID = range(5)
VOCAB_SIZE = 2048
CURRICULUM_COUNT = 24_000
GSM8K_LIMIT = 2_000

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learns the merges of a tokenizer that reproduces any UTF-8 text exactly.

    Every digit is a token of its own, so that a number's length is its digit count. The special
    tokens have the ids 0 to 4 and the 256 bytes the next ones.

    Args:
        texts: Training texts; their frequencies decide the merges.
        vocab_size: Exact size, special tokens included; texts with too few distinct words to
            fill it leave reserved tokens at the end.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    unfilled = range(tokenizer.get_vocab_size(), vocab_size)
    tokenizer.add_special_tokens([f"<|reserved_{index}|>" for index in unfilled])
    return tokenizer


def tokenizer_texts(gsm8k: Sequence[Example] = (), seed: int = 0) -> list[str]:
    """Texts for `train_tokenizer`, weighted so that the curriculum's words are a token or two.

    GSM8K's long texts would outvote the curriculum's rarer names and cities, hence the many
    problems and the limit on GSM8K's.

    Args:
        gsm8k: Examples of GSM8K's training text; the first `GSM8K_LIMIT` of them are used.
        seed: Seed of the curriculum's training problems.
    """
    examples = make_examples(seed, "train", CURRICULUM_COUNT) + list(gsm8k[:GSM8K_LIMIT])
    texts = (("user\n" + e.prompt, "assistant\n", e.answer) for e in examples)
    return [text for triple in texts for text in triple]


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Writes the two files from which `transformers.AutoTokenizer` loads offline."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": PAD,
        "mask_token": MASK,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a target's directory."""
    return Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text` as plain text: markup written in it stays ordinary characters."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    finally:
        tokenizer.encode_special_tokens = before


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of one user turn and the opening of the assistant's.

    Equal to the chat template's, except where `prompt` itself contains markup. The role and the
    content are encoded together, because white space at the start of `prompt` may merge with the
    line break before it.
    """
    return [
        IM_START_ID, *encode_text(tokenizer, f"user\n{prompt}"), IM_END_ID,
        *encode_text(tokenizer, "\n"), IM_START_ID, *encode_text(tokenizer, "assistant\n"),
    ]  # fmt: skip


def encode_document(tokenizer: Tokenizer, example: Example) -> tuple[list[int], int]:
    """Token ids of a whole training document, and how many of them are the prompt's.

    The answer is encoded apart from the prompt, as a decoder that starts after it sees it, and
    ends with `<|im_end|>`.
    """
    prompt = encode_prompt(tokenizer, example.prompt)
    return [*prompt, *encode_text(tokenizer, example.answer), IM_END_ID], len(prompt)
