"""A tiny random target whose choices vary, requests for it, and the decoders that tests share."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from spot_jax import drafter_io, noise
from spot_jax.commit import Threshold, TopN
from spot_jax.config import Sampling, TargetConfig
from spot_jax.decode import DecodeConfig
from spot_jax.draft import (
    Chain,
    ConfidenceTree,
    Oracle,
    RandomTree,
    RankOptions,
    Spot,
    SpotSets,
    make_ranks,
)
from spot_jax.models.order import OrderConfig, OrderNetwork, order_features
from spot_jax.models.target import TargetModel, param_shapes
from spot_jax.state import Reading

MASK, PAD, EOS = 50, 2, (3, 5)
CONFIG = TargetConfig(
    vocab_size=61, num_token_ids=57, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, intermediate_size=24, block_length=4, mask_id=MASK, eos_ids=EOS, pad_id=PAD,
    max_position=64, rope_theta=1e3,
)  # fmt: skip
# Every place in a block that a prompt may end at, shorter than a block and longer than two.
LENGTHS = (1, 3, 4, 6, 8, 11)
ORDER = OrderConfig(
    num_top=8, num_alternatives=2, max_block=8, width=16, num_heads=2, num_layers=1, mlp_width=16
)
COLD, WARM = Sampling(), Sampling(temperature=1.0)
PLAIN = DecodeConfig(max_new_tokens=10, num_top=8, sampling=WARM)
# Plain decoders run through the shape of a budget: what drafted decoding must equal bit for bit.
REFERENCES = {
    "greedy": DecodeConfig(max_new_tokens=10, num_top=8, sampling=COLD, reference_shape=4),
    "sampled": DecodeConfig(max_new_tokens=10, num_top=8, sampling=WARM, reference_shape=8),
    "pairs": DecodeConfig(
        max_new_tokens=10, num_top=8, sampling=WARM, rule=TopN(2, "random"), reference_shape=4
    ),
    "filters": DecodeConfig(
        max_new_tokens=10,
        num_top=8,
        sampling=Sampling(temperature=0.8, top_k=20, top_p=0.9, confidence="raw"),
        rule=Threshold(0.4, strict=False),
        reference_shape=2,
        chunk=24,
    ),
}


def target(config: TargetConfig = CONFIG, dtype=jnp.float32, seed: int = 0) -> TargetModel:
    """Random weights, large enough for peaked distributions that depend on the whole context."""
    random = np.random.default_rng(seed)
    params = {}
    for name, shape in param_shapes(config).items():
        scale, centre = (0.1, 1.0) if name.endswith("norm") else (0.5, 0.0)
        scale = 1.0 if name == "embed" else scale
        params[name] = jnp.asarray(centre + scale * random.normal(size=shape), dtype)
    return TargetModel(params, config)


def requests(seed: int = 0, lengths=LENGTHS):
    """Prompts, their lengths and the keys of requests."""
    random = np.random.default_rng(seed)
    prompts = random.integers(6, MASK, size=(len(lengths), max(LENGTHS)))
    return jnp.asarray(prompts), jnp.array(lengths), noise.request_keys(seed, len(lengths))


def order_params(seed: int = 0):
    """Random weights of an order network, large enough to have opinions."""
    flat, alternatives = jnp.zeros((1, 4)), jnp.zeros((1, 4, ORDER.num_alternatives))
    tops = jnp.zeros((1, 4, ORDER.num_top))
    reading = Reading(flat.astype(int), flat, tops, tops.astype(int), flat, flat)
    masked = flat == 0
    features = order_features(
        reading, alternatives, alternatives, alternatives.astype(int), masked, masked, masked
    )
    params = OrderNetwork(ORDER).init(jax.random.key(seed), features)["params"]
    return jax.tree.map(lambda x: 2 * x, params)


def spot_sets(seed: int = 0) -> SpotSets:
    """A set drafter with random weights, its last layer small: stale confidence decides most."""
    random = np.random.default_rng(seed)
    shapes = drafter_io.param_shapes(ORDER, "spot-sets")
    flat = {name: jnp.asarray(0.1 * random.normal(size=s), float) for name, s in shapes.items()}
    return SpotSets(traverse_util.unflatten_dict(flat, sep="/"), ORDER)


# The likeliest orders of two ranks, and a token that is not the likeliest.
FORMULAS = (
    (((0, 0),),),
    (((0, 0),), ((1, 0),)),
    (((1, 0),),),
    (((0, 1),),),
    (((1, 0),), ((2, 0),)),
    (((0, 0),), ((2, 0),)),
    (((2, 0),),),
    (((3, 0),),),
    (((0, 0),), ((1, 1),)),
)


def ranks(coupled: bool = False, prune: bool = False, formulas=FORMULAS):
    """A drafter of rank formulas, made up."""
    shares = [1 / (2 + i) for i in range(len(formulas))]
    return make_ranks(formulas, shares, RankOptions(coupled=coupled, prune=prune))


def drafters(step):
    """One of every kind; `step` is the trace of plain decoding, for the oracle."""
    return (
        Chain(),
        ConfidenceTree(2.0),
        RandomTree(jax.random.key(11)),
        Spot(order_params(), ORDER),
        Oracle(jnp.asarray(step)),
        ranks(),
        ranks(coupled=True, prune=True),
    )
