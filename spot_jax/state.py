"""The types that pass between modules, and the legend of their shape letters.

B  sequences (rows)        N  nodes of a draft tree = slots of one pass
L  positions of a block    C  positions of a canvas (prompt and answer)
V  vocabulary              R  most probable tokens kept of a distribution
D  width                   H, G, K  heads, key heads, head width
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

ROOT = 0
NO_PARENT = -1


class State(NamedTuple):
    """A block in the middle of decoding.

    Attributes:
      tokens: ids; the mask id where `masked`.
      masked: positions not committed yet. Never derived from the tokens: a prompt may hold the
        mask token literally.
    """

    tokens: Int[Array, "*n L"]
    masked: Bool[Array, "*n L"]


class Reading(NamedTuple):
    """What a step knows of each position after a pass. All floats are float32.

    Attributes:
      token: the token drawn at this position (most probable plus noise).
      confidence: its log-probability, under the distribution that the sampler measures.
      top_log_probs: the R highest log-probabilities of that distribution, descending.
      top_tokens: their ids; equal probabilities in order of id.
      log_doubt: log of the probability of everything but the most probable token; precise
        where the log-probability itself rounds to 0.
      entropy: of the distribution, in nats.
    """

    token: Int[Array, "*n L"]
    confidence: Float[Array, "*n L"]
    top_log_probs: Float[Array, "*n L R"]
    top_tokens: Int[Array, "*n L R"]
    log_doubt: Float[Array, "*n L"]
    entropy: Float[Array, "*n L"]


class DraftTree(NamedTuple):
    """Block states to check in one pass. Slot 0 is the root: the known next state.

    Attributes:
      tokens: states of the nodes.
      masked: the same.
      parent: slot of the node that this one was drafted from; `NO_PARENT` at the root and in
        empty slots. Only for inspection: the check goes by state equality.
      valid: slots in use. No two valid nodes are the same state.
      log_value: log of the estimated probability that decoding passes through the node.
    """

    tokens: Int[Array, "B N L"]
    masked: Bool[Array, "B N L"]
    parent: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    log_value: Float[Array, "B N"]


class Layout(NamedTuple):
    """Which block each slot of a pass belongs to, where one pass reads several.

    A block that is *clean* in a pass, all of it known or guessed, is read for its keys alone: the
    nodes of later blocks see them. Its slot is no valid node. The all-mask start of the block
    behind it has the slot after it. Behind the last start masks may stand for a clean block, so
    that one more start, which is no valid node either, can be read.

    Attributes:
      place: block of a slot, counted from the current one; -1 for the finished block before it.
      clean: slots of the clean blocks at places -1, 0, 1, ...; -1 where there is none.
    """

    place: Int[Array, "B N"]
    clean: Int[Array, "B P"]


class Verdict(NamedTuple):
    """Outcome of the walk through one draft tree.

    Attributes:
      order: at which move a slot was visited, counting from 0; -1 if it was not.
      last: the slot visited last; its reading is the freshest.
      num_steps: moves of the plain decoder made, at least 1 (the root's own).
    """

    order: Int[Array, "B N"]
    last: Int[Array, " B"]
    num_steps: Int[Array, " B"]


class Trace(NamedTuple):
    """How each position of the canvas came about; -1 where it was not decoded.

    Attributes:
      step: step of the row, counting from 0, that committed it.
      pass_: pass of the row, counting from 0, in which that happened.
      confidence: log-probability of the token at that moment; 0 where not decoded.
    """

    step: Int[Array, "B C"]
    pass_: Int[Array, "B C"]
    confidence: Float[Array, "B C"]


class DecodeResult(NamedTuple):
    """What `decode` returns.

    Attributes:
      tokens: prompt and answer, `pad_id` after the end of the answer.
      lengths: tokens of the answer, without the end-of-text token that closed it.
      stopped: whether an end-of-text token ended it (otherwise the length limit did).
      steps: moves of the plain decoder.
      passes: forwards of the target after prefill, those that open a block included.
      drafted: states checked beyond the known next ones.
      accepted: drafted states that decoding went through.
      trace: how each position came about.
      passes_at: passes at each of the sizes of `config.settled(...).costs`; None where the budget
        is fixed.
    """

    tokens: Int[Array, "B C"]
    lengths: Int[Array, " B"]
    stopped: Bool[Array, " B"]
    steps: Int[Array, " B"]
    passes: Int[Array, " B"]
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    trace: Trace
    passes_at: Int[Array, "B S"] | None = None
