"""Options of the commands. Imports nothing heavy, so that `--help` is quick."""

import dataclasses
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

Dtype = Literal["float32", "bfloat16"]
_File = Annotated[str | None, arg(metavar="FILE", help_behavior_hint="")]
_Int = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
_Prompt = Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT", help_behavior_hint="")]
_Model = Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: the bundled one)")]
_DRAFTERS = "{none,chain,tree,spot,DIR,FILE}"
_Drafter = Annotated[
    str | None,
    arg(metavar=_DRAFTERS, help_behavior_hint="(default: spot; tree where steps commit sets)"),
]
_Budget = Annotated[int | str | None, arg(metavar="{INT,auto}", help_behavior_hint="(default: 16)")]
_Cache = Annotated[
    Literal["prefix", "none", "dual"] | None,
    arg(metavar="{prefix,none,dual}", help_behavior_hint="(default: the exact one)"),
]
_Temperature = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 0)")]
_TopP = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 1)")]
_TopK = Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 0, all)")]
_Confidence = Annotated[
    Literal["filtered", "raw"] | None,
    arg(metavar="{filtered,raw}", help_behavior_hint="(default: filtered)"),
]
_BUNDLED = "(default: bundled)"
_Flag = Annotated[bool, arg(help_behavior_hint="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What `generate` and `verify` share."""

    prompt: _Prompt = ()
    """one prompt; quote it"""
    input: _File = None
    """requests as JSON lines ("-": standard input): id, and prompt, messages or prompt_ids"""
    model: _Model = None
    """target, a Hugging Face or converted directory"""
    drafter: _Drafter = None
    """nothing, a chain or tree by confidence, the bundled SPOT drafter, one in a directory, or rank
    formulas in a .json file"""
    budget: _Budget = None
    """block states checked in one pass, the known next one included; "auto" chooses them for every
    pass by what passes take on this device, and none where nothing is gained"""
    costs: _File = None
    """what --budget auto goes by, from bench --cost; without it measured once, and kept"""
    look_ahead: _Flag = False
    """drafts go on behind the end of a block; pays where blocks are short"""
    sampler: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """defaults of a reference sampler: sdar, llada, dream-entropy, fast-dllm-v2 ..."""
    rule: Annotated[str | None, arg(metavar="RULE", help_behavior_hint="(default: confidence)")] = (
        None
    )
    """confidence, left-to-right, margin, entropy, random, n:K, factor:F, threshold:[>=]P"""
    sub_block: _Int = None
    """finishes parts of a block of this many positions from left to right"""
    steps: _Int = None
    """per block, for samplers with a schedule"""
    order_temperature: float = 0.0
    """draws positions by their score at this temperature (Dream's alg_temp)"""
    cache: _Cache = None
    """of positions outside the block; "dual" freezes them, another decoder than "none" """
    temperature: _Temperature = None
    """0 takes the likeliest token"""
    top_p: _TopP = None
    """draws among the likeliest tokens that together reach this probability"""
    top_k: _TopK = None
    """draws among this many likeliest tokens"""
    confidence: _Confidence = None
    """measured after temperature and filters (SDAR), or before them (LLaDA)"""
    suppress: Annotated[UseAppendAction[tuple[int, ...]], arg(metavar="ID")] = ()
    """token that is never written, such as an end of text"""
    seed: int = 0
    """of the noise; a request's noise depends on it and the request's place in the input"""
    max_new_tokens: int = 256
    """longest answer, exact"""
    ignore_eos: _Flag = False
    """goes on behind end-of-text tokens"""
    dtype: Dtype = "float32"
    """of the target's weights and arithmetic"""
    block_length: _Int = None
    """goes before what the model directory says"""
    mask_token_id: _Int = None
    """goes before what the model directory says"""
    batch_size: int = 16
    """most requests decoded together"""
    raw_prompt: _Flag = False
    """encodes prompts as they are, without the chat template"""
    parse_special: _Flag = False
    """takes markup in prompts for special tokens"""
    no_cache: _Flag = False
    """compiles afresh rather than from the cache in the user's cache folder"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(DecodeOptions):
    """Write text with a diffusion language model, several steps in one pass."""

    output: _File = None
    """results as JSON lines in the input's order ("-": standard output); a file is resumed by id,
    with the same prompts and options"""
    num_samples: int = 1
    """answers to each prompt; answer k has the noise of seed + k"""
    stop: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")] = ()
    """ends an answer where this text first occurs"""
    compare: _Flag = False
    """also decodes plainly; reports both counts and whether the answers are equal"""
    stats: _File = None
    """what the summary says, as JSON: a list with one object a decoder"""
    trace: _File = None
    """JSON lines, one a token: id, position, token, step, pass, confidence"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify(DecodeOptions):
    """Decode plainly and with a drafter, and compare tokens and order of commits.

    Verdict and exit status: EQUAL 0; TIE 0 (they part at a decision nearer than rounding errors);
    DIFFERENT 1; INCONCLUSIVE 2 (equal, but nothing was drafted). Without a prompt, a few of its
    own are decoded.
    """

    cross_shape: _Flag = False
    """compares with the one-state program, whose rounding may differ, not with the same shape"""
    json: _Flag = False
    """prints the verdict and its figures as one JSON object"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Decode tasks plainly and with drafters: equality first, then steps per pass and speed.

    Writes one JSON object a cell (target, task, rule, temperature, drafter, budget), as it is done;
    tables go to standard error. A cell whose answers are neither equal to plain decoding nor part
    from it at a tie has no figures, and the exit status is 1.
    """

    models: Annotated[tuple[str, ...], arg(metavar="DIR ...", help_behavior_hint=_BUNDLED)] = ()
    """targets"""
    tasks: Annotated[tuple[str, ...], arg(metavar="FILE ...", help_behavior_hint=_BUNDLED)] = ()
    """requests as JSON lines, one file a task"""
    drafters: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = (
        "chain",
        "tree",
        "spot",
        "oracle",
    )
    """chain, tree, spot, a drafter's directory, a .json file of rank formulas, or the oracle, which
    knows the order to come"""
    budgets: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (4, 8, 16, 32)
    """block states checked in one pass"""
    temperatures: Annotated[tuple[float, ...], arg(metavar="FLOAT ...")] = (0.0, 1.0)
    """0 takes the likeliest token"""
    rules: Annotated[tuple[str, ...], arg(metavar="RULE ...")] = ("confidence",)
    """as of generate: confidence, left-to-right, n:K, threshold:P ..."""
    count: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: all)")] = None
    """requests of each task, from its beginning"""
    out: _File = None
    """file of results, resumed where it exists; without it they go to standard output"""
    cost: _Flag = False
    """decodes nothing, but measures how long passes take at each budget, and drafting for them"""
    context: int = 256
    """tokens of the prompts that --cost measures behind"""
    plot: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """pictures (PNG) of steps per pass and tokens per second"""
    look_ahead: _Flag = False
    """drafts go on behind the end of a block, in every cell that drafts"""
    max_new_tokens: int = 128
    """longest answer, exact"""
    cache: _Cache = None
    """of positions outside the block"""
    seed: int = 0
    """of the noise"""
    dtype: Dtype = "float32"
    """of the targets' weights and arithmetic"""
    batch_size: int = 4
    """most requests decoded together"""
    no_cache: _Flag = False
    """compiles afresh rather than from the cache in the user's cache folder"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a Hugging Face directory into a checkpoint, or back."""

    source: Annotated[Positional[str], arg(metavar="HF_DIR")]
    """directory to read"""
    out: Annotated[Positional[str], arg(metavar="OUT")]
    """directory to create"""
    dtype: Dtype | None = None
    """of the written weights; without it, as they are"""
    block_length: _Int = None
    """goes before what the source says"""
    mask_token_id: _Int = None
    """goes before what the source says"""
    overwrite: _Flag = False
    """replaces a checkpoint at OUT, or with --to-hf a model of one file"""
    dry_run: _Flag = False
    """checks all but the weights' values, writes nothing"""
    to_hf: _Flag = False
    """writes a Hugging Face directory"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertDrafter:
    """Convert an order network trained in PyTorch into a drafter.

    Reads names as of torch.nn.TransformerEncoder; the names in published SPOT drafters are not
    known to us, so others need --mapping.
    """

    source: Annotated[Positional[str], arg(metavar="FILE")]
    """state dict (.pt, nothing in it is executed) or .safetensors"""
    out: Annotated[Positional[str], arg(metavar="OUT")]
    """directory to create"""
    trained_on: str
    """target that it was trained on, for people to read"""
    block_length: tuple[int, ...]
    """block lengths that it was trained on"""
    mapping: _File = None
    """JSON object: name in FILE -> name that is expected"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Report versions, devices, the compilation cache, the bundled models and model families."""


COMMANDS = {
    "generate": Generate,
    "verify": Verify,
    "bench": Bench,
    "convert": Convert,
    "convert-drafter": ConvertDrafter,  # written `convert drafter`
    "doctor": Doctor,
}
