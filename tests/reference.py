"""Slow twins of the decoder: plain loops in numpy, sharing no code with what they check.

Only the target's own forward is borrowed, to turn a sequence into logits. Arithmetic is float64.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spot_jax.commit import TopN
from spot_jax.models.attention import attend_masked
from spot_jax.models.target import Target, head_weight
from spot_jax.rules import Factor, HandOver, Release, SubBlocks

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[int, int], left, right) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011) of word pairs under one key."""
    x, y = np.atleast_1d(np.asarray(left, np.uint32)), np.atleast_1d(np.asarray(right, np.uint32))
    words = [np.uint32(key[0]), np.uint32(key[1])]
    words.append(words[0] ^ words[1] ^ np.uint32(0x1BD11BDA))
    x, y = x + words[0], y + words[1]
    for group in range(5):
        for turn in ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(turn)) | (y >> np.uint32(32 - turn))
            y = y ^ x
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def fold(key: tuple[int, int], *coordinates: int) -> tuple[int, int]:
    """`jax.random.fold_in` of each coordinate in turn."""
    for coordinate in coordinates:
        x, y = threefry(key, 0, coordinate)
        key = (int(x[0]), int(y[0]))
    return key


def key_words(key: jax.Array) -> tuple[int, int]:
    """The two words of a typed key."""
    data = np.asarray(jax.random.key_data(key))
    return int(data[0]), int(data[1])


def gumbel(key: tuple[int, int], position: int, count: int, ids) -> np.ndarray:
    """Noise of tokens at one position with `count` positions of its block committed."""
    ids = np.asarray(ids, np.uint32)
    high, low = threefry(fold(key, 0, position, count), ids, np.zeros_like(ids))
    uniform = (high.astype(np.float64) + (low.astype(np.float64) + 0.5) / 2**32) / 2**32
    return -np.log(-np.log1p(-uniform))


def order_uniform(key: tuple[int, int], position: int, count: int) -> float:
    """The draw that orders a position under the random rule."""
    x, y = threefry(fold(key, 1, position, count), 0, 0)
    return float((x[0] ^ y[0]) >> np.uint32(9)) / 2**23


class PositionReading(NamedTuple):
    """What a step knows of one position."""

    token: int
    confidence: float
    top: list[tuple[float, int]]
    log_doubt: float
    entropy: float


def read(logits, noise, sampling, config) -> PositionReading:
    """Reads one position from its full row of logits; `noise` is not looked at where T is 0."""
    ids = range(len(logits))
    if not sampling.reference_vocab:
        ids = [v for v in ids if v < config.num_token_ids and v != config.mask_id]
    raw = {v: float(logits[v]) for v in ids if v not in sampling.suppressed}
    drawn_from = dict(raw)
    if sampling.temperature > 0 or sampling.confidence == "filtered":
        drawn_from = {v: x / (sampling.temperature or 1) for v, x in raw.items()}
        ordered = sorted(drawn_from.values(), reverse=True)
        if 0 < sampling.top_k < len(ordered):
            kth = ordered[sampling.top_k - 1]
            drawn_from = {v: x for v, x in drawn_from.items() if x >= kth}
        if sampling.top_p < 1:
            probs = {v: math.exp(x) for v, x in log_softmax(drawn_from).items()}
            mass, lowest = 0.0, math.inf
            for v in sorted(probs, key=lambda v: -probs[v]):
                if mass >= sampling.top_p:
                    break
                lowest, mass = drawn_from[v], mass + probs[v]
            drawn_from = {v: x for v, x in drawn_from.items() if x >= lowest}
    measured = raw if sampling.confidence == "raw" else drawn_from
    log_probs = log_softmax(measured)
    score = drawn_from
    if sampling.temperature > 0:
        score = {v: x + noise[v] for v, x in drawn_from.items()}
    token = min(score, key=lambda v: (-score[v], v))
    best = min(log_probs, key=lambda v: (-log_probs[v], v))
    doubt = math.fsum(math.exp(x) for v, x in log_probs.items() if v != best)
    return PositionReading(
        token=token,
        # The sum of the others is exact where the log-probability itself rounds to 0.
        confidence=math.log1p(-doubt) if token == best and doubt < 0.5 else log_probs[token],
        top=sorted(((x, v) for v, x in log_probs.items()), key=lambda pair: (-pair[0], pair[1])),
        log_doubt=math.log(doubt) if doubt > 0 else -math.inf,
        entropy=-math.fsum(math.exp(x) * x for x in log_probs.values()),
    )


def log_softmax(logits: dict[int, float]) -> dict[int, float]:
    """Of a sparse distribution."""
    peak = max(logits.values())
    total = peak + math.log(math.fsum(math.exp(x - peak) for x in logits.values()))
    return {v: x - total for v, x in logits.items()}


def scores(score: str, readings: dict[int, PositionReading], uniform) -> dict[int, float]:
    """What a rule ranks masked positions by, highest first."""
    if score == "confidence":
        return {i: r.confidence for i, r in readings.items()}
    if score == "left_to_right":
        return {i: -float(i) for i in readings}
    if score == "margin":
        return {i: math.exp(r.top[0][0]) - math.exp(r.top[1][0]) for i, r in readings.items()}
    if score == "entropy":
        return {i: -r.entropy for i, r in readings.items()}
    return {i: uniform(i) for i in readings}


def commit(readings: dict[int, PositionReading], rule, uniform, fixed=None) -> list[int]:
    """Which of the masked positions (the keys of `readings`) a rule commits.

    Args:
      readings: of the masked positions.
      rule: a commit rule.
      uniform: draw of a position at this step.
      fixed: draw of a position that is the same at every step.
    """
    if isinstance(rule, Release):
        share = (1 - rule.eps) / rule.steps
        when = {i: min(int((1 - fixed(i)) / share), rule.steps - 1) for i in readings}
        return [i for i in readings if when[i] == min(when.values())]
    if isinstance(rule, Factor):
        order = sorted(readings, key=lambda i: (-readings[i].confidence, i))
        number = 1
        while number < len(order):
            if math.exp(readings[order[number]].confidence) < 1 - rule.factor / (number + 2):
                break
            number += 1
        return order[:number]
    if isinstance(rule, TopN):
        value = scores(rule.score, readings, uniform)
        if rule.order_temperature:
            value = {i: math.exp(x) if rule.score == "confidence" else x for i, x in value.items()}
            value = {
                i: x / rule.order_temperature - math.log(-math.log(uniform(i)))
                for i, x in value.items()
            }
        number = rule.n
        if isinstance(number, tuple):
            number = next_of_schedule(number, len(readings))
        return sorted(readings, key=lambda i: (-value[i], i))[:number]
    best = sorted(readings, key=lambda i: (-readings[i].confidence, i))[: rule.n]
    level = math.log(rule.threshold)
    crossing = [
        i
        for i, r in readings.items()
        if r.confidence > level or (r.confidence == level and not rule.strict)
    ]
    return crossing if len(crossing) >= min(rule.n, len(readings)) else best


def next_of_schedule(schedule: tuple[int, ...], masked: int) -> int:
    """Commits of the step at which `masked` positions are left."""
    left = sum(schedule)
    if masked >= left:
        return schedule[0]
    for n in schedule:
        if masked > left - n:
            return masked - (left - n)
        left -= n
    return 0


def candidates(masked: list[int], rule, start: int) -> list[int]:
    """Masked positions that a rule may commit next."""
    if isinstance(rule, HandOver):
        return [start] if start in masked else candidates(masked, rule.rule, start)
    if isinstance(rule, SubBlocks):
        masked = candidates(masked, rule.rule, start)
        return [
            i for i in masked if (i - start) // rule.length == (masked[0] - start) // rule.length
        ]
    return masked


def inner(rule):
    """The rule inside its wrappers."""
    return inner(rule.rule) if isinstance(rule, HandOver | SubBlocks) else rule


def set_law(cross, order, positions, n: int, crosses: bool) -> dict[frozenset, float]:
    """Law of the next commits, {(position, alternative), ...} -> probability, by enumeration.

    Args:
      cross: log-odds `[L, A]` that a position crosses with each alternative, against staying.
      order: scores `[L, A]` of the positions that are picked where fewer than n cross.
      positions: that may be committed.
      n: of the rule.
      crosses: whether the rule has a threshold at all.
    """
    number = min(n, len(positions))
    alternatives = range(np.shape(cross)[1])
    weights = {}
    for chosen in itertools.combinations(positions, number):
        for tokens in itertools.product(alternatives, repeat=number):
            pairs = list(zip(chosen, tokens, strict=True))
            weights[frozenset(pairs)] = math.exp(sum(order[i][a] for i, a in pairs))
    total = math.fsum(weights.values())
    picked = {commits: weight / total for commits, weight in weights.items()}
    if not crosses:
        return picked
    law: dict[frozenset, float] = {}
    for outcome in itertools.product([None, *alternatives], repeat=len(positions)):
        pairs = [(i, a) for i, a in zip(positions, outcome, strict=True) if a is not None]
        chance = math.prod(
            (1.0 if a is None else math.exp(cross[i][a]))
            / (1 + math.fsum(math.exp(cross[i][b]) for b in alternatives))
            for i, a in zip(positions, outcome, strict=True)
        )
        follows = {frozenset(pairs): 1.0} if len(pairs) >= number else picked
        for commits, share in follows.items():
            law[commits] = law.get(commits, 0.0) + chance * share
    return law


def set_tree(law_of, num_positions: int, budget: int) -> dict[frozenset, float]:
    """Best-first growth over explicit states, {(position, alternative), ...} -> value.

    `law_of(state)` is as of `set_law`. A parent found late adds to a node's value, but not to what
    is below it, and the last node is not expanded.
    """
    value: dict[frozenset, float] = {frozenset(): 1.0}
    laws = {frozenset(): law_of(frozenset())}
    while len(value) < budget:
        edges = [
            (value[state] * chance, state | commits)
            for state, law in laws.items()
            for commits, chance in law.items()
            if state | commits not in value and len(state | commits) < num_positions
        ]
        if not edges:
            break
        _, new = max(edges, key=lambda edge: edge[0])
        value[new] = math.fsum(chance for chance, state in edges if state == new)
        if len(value) < budget:
            laws[new] = law_of(new)
            for commits, chance in laws[new].items():
                if new | commits in value:
                    value[new | commits] += value[new] * chance
    return value


class Decoded(NamedTuple):
    """One row of a `DecodeResult`."""

    tokens: list[int]
    length: int
    stopped: bool
    steps: int
    step: list[int]
    confidence: list[float]


def decode(target, prompt, key, config, width: int) -> Decoded:
    """Plain decoding of one row that recomputes everything at every step.

    Args:
      target: a `TargetModel`.
      prompt: token ids.
      key: typed key of the request.
      config: a `DecodeConfig`.
      width: of the canvas.
    """
    shape, key = target.config, key_words(key)
    length, full = shape.block_length, shape.attention == "full"
    limit = len(prompt) + config.max_new_tokens
    tokens = [*prompt, *[shape.mask_id] * (width - len(prompt))]
    masked = [len(prompt) <= i < (limit if full else width) for i in range(width)]
    trace, confidence = [-1] * width, [0.0] * width
    start = len(prompt) if shape.grid == "anchored" else len(prompt) // length * length
    opened, steps, end, stopped = tokens, 0, None, False
    rule = HandOver(config.rule) if shape.hand_over else config.rule
    while end is None:
        block = range(start, min(start + length, width))
        count = length - sum(masked[i] for i in block)
        logits = _predictions(target, tokens, opened, block, limit, config.cache == "dual")
        chosen = candidates([i for i in block if masked[i]], rule, start)
        readings = {}
        for i in chosen:
            noise = gumbel(key, i, count, np.arange(shape.vocab_size))
            if shape.hand_over and i == start:
                noise = np.zeros_like(noise)
            readings[i] = read(logits[i - start], noise, config.sampling, shape)
        draw = functools.partial(_order_draw, key, count)
        for i in commit(readings, inner(rule), draw, functools.partial(_order_draw, key, 0)):
            tokens = [*tokens[:i], readings[i].token, *tokens[i + 1 :]]
            masked[i] = False
            trace[i], confidence[i] = steps, readings[i].confidence
        steps += 1
        # The text is determined by an end-of-text token, or by the limit, with nothing open before.
        for i in range(max(start, len(prompt)), min(start + length, limit)):
            if masked[i]:
                break
            if config.stop_at_eos and tokens[i] in shape.eos_ids:
                end, stopped = i, True
                break
        else:
            if start + length >= limit:
                end = limit
        if not any(masked[i] for i in block):
            start += length
            opened = tokens
    tokens = [t if i < end else shape.pad_id for i, t in enumerate(tokens)]
    return Decoded(tokens, end - len(prompt), stopped, steps, trace, confidence)


def _order_draw(key, count, position):
    return order_uniform(key, position, count)


def _predictions(target, tokens, opened, block, limit, frozen) -> np.ndarray:
    """Logits of the positions of a block, float64.

    With `frozen` keys two sequences are run as one: the canvas as it was when the block opened,
    and the block as it is now, which sees that canvas in all places but its own.
    """
    shape = target.config
    width, shift = len(tokens), int(shape.shift)
    index = np.arange(width)
    if shape.attention == "full":
        visible = np.broadcast_to(index[None] < limit, (width, width))
    else:
        visible = index[:, None] // shape.block_length >= index[None] // shape.block_length
    if not frozen:
        return sequence_logits(target, tokens, index, visible)[[i - shift for i in block]]
    own = np.arange(len(block))
    outside = (index < limit) & ~np.isin(index, block)
    visible = np.block(
        [
            [visible, np.zeros((width, len(own)), bool)],
            [np.broadcast_to(outside, (len(own), width)), np.ones((len(own), len(own)), bool)],
        ]
    )
    current = [tokens[i] for i in block]
    logits = sequence_logits(
        target, [*opened, *current], np.concatenate([index, np.array(block)]), visible
    )
    if not shift:
        return logits[width:]
    return np.concatenate([logits[block[0] - 1 : block[0]], logits[width:-1]])


def sequence_logits(target, tokens, positions, visible) -> np.ndarray:
    """Logits of one whole sequence under an explicit mask, float64."""
    arrays = jnp.array(tokens), jnp.array(positions), jnp.array(visible)
    return np.asarray(_sequence_logits(target, *arrays), np.float64)


@jax.jit
def _sequence_logits(target, tokens, positions, visible) -> Any:
    hidden, _ = Target(target.config).apply(
        {"params": target.params}, tokens, positions, attend_masked(visible)
    )
    return hidden @ head_weight(target.params).T


def _forward(target, tokens) -> np.ndarray:
    """Logits of one whole sequence under the block-causal mask."""
    index = np.arange(len(tokens))
    block = index // target.config.block_length
    return sequence_logits(target, tokens, index, block[:, None] >= block[None, :])


def walk(nodes: list, valid, successors: list, final, root: int) -> list[int]:
    """Slots visited: from the root, the first valid node that equals the successor, and so on."""
    path = [root]
    while not final[path[-1]]:
        following = successors[path[-1]]
        found = [i for i, node in enumerate(nodes) if valid[i] and node == following]
        if not found:
            break
        path.append(found[0])
    return path


def nearest(tokens, masked, valid, state_tokens, state_masked) -> int:
    """Slot of the valid state with the most commits among those whose commits the state has."""
    best, most = -1, -1
    for slot in range(len(valid)):
        commits = {(i, t) for i, t in enumerate(tokens[slot]) if not masked[slot][i]}
        held = {(i, t) for i, t in enumerate(state_tokens) if not state_masked[i]}
        if valid[slot] and commits <= held and len(commits) > most:
            best, most = slot, len(commits)
    return best


def rank_states(formulas, coupled, state, tops, draw, score) -> list:
    """State of each rank formula, or None where it does not fit, and its mean log-probability.

    Args:
      formulas: steps of (position rank, token rank) pairs.
      coupled: whether token ranks follow the draws at the step of the pair.
      state: tokens and masked flags of the root.
      tops: of each position, (log-probability, token) pairs, the most probable first.
      draw: `draw(position, commits)`, the same pairs in the order of the perturbed scores.
      score: `score(readings, commits)`, what a rule ranks the masked positions by.
    """
    tokens, masked = state
    root = len(tokens) - sum(masked)
    at = draw if coupled else lambda i, commits: tops[i]
    first = {i: at(i, root)[0] for i in range(len(tokens)) if masked[i]}
    value = score(
        {i: PositionReading(v, x, tops[i], 0.0, 0.0) for i, (x, v) in first.items()}, root
    )
    ranked = sorted(first, key=lambda i: (-value[i], i))
    found = []
    for formula in formulas:
        new, open_, logs, commits, fits = list(tokens), list(masked), [], root, True
        for step in formula:
            for place, token in step:
                fits = fits and place < len(ranked) and token < len(tops[0])
                if fits:
                    log_prob, new[ranked[place]] = at(ranked[place], commits)[token]
                    open_[ranked[place]] = False
                    logs.append(log_prob)
            commits += len(step)
        fits = fits and any(open_) and min(logs) > -math.inf
        found.append(((new, open_), sum(logs) / len(logs)) if fits else None)
    return found


def prune(formulas, logs, number: int) -> list[int]:
    """The formulas that run-time pruning keeps; `logs` is None where one does not fit."""
    sets = [frozenset(pair for step in formula for pair in step) for formula in formulas]
    here = [i for i in range(len(formulas)) if logs[i] is not None]
    edges = [(a, b) for a in here for b in here if sets[a] < sets[b]]
    edges = [(a, b) for a, b in edges if len(formulas[a]) + 1 == len(formulas[b])]
    score = {}
    for i in sorted(here, key=lambda i: -len(formulas[i])):
        family = [logs[i], *(score[b] for a, b in edges if a == i)]
        score[i] = sum(family) / len(family)
    for i in sorted(here, key=lambda i: len(formulas[i])):
        if len(formulas[i]) > 1:
            best = max((score[a] for a, b in edges if b == i), default=-math.inf)
            score[i] = min(score[i], best)
    return sorted(sorted(here, key=lambda i: (-score[i], i))[:number])


def quickest(costs, steps, opening: bool, drafting) -> int:
    """Index of the size with the most expected steps a time; `steps[j]` are those of slot j."""
    best, index = -1.0, 0
    for i, size in enumerate(costs.sizes):
        # A pass that opens a block reads two states.
        time = max(costs.evaluate[i], costs.evaluate[1]) if opening else costs.evaluate[i]
        speed = sum(steps[:size]) / (time + drafting[i])
        if speed > best * (1 + 1e-6):
            best, index = speed, i
    return index


def slot_worth(seen, row: int, slot: int, prior: float) -> float:
    """Expected visits of a drafted slot; `seen` has the arrays of an experience and of a tree."""
    if slot == 0:
        return 1.0
    if not seen["valid"][row][slot]:
        return 0.0
    truth = (seen["reached"][slot] + prior) / (seen["hoped"][slot] + prior)
    return min(1.0, math.exp(seen["log_value"][row][slot]) * truth)
