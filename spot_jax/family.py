"""What a family of targets is: a row of the table in `family_rows`."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where a tensor goes: its rows, in order, to these leaves at this index of each."""

    leaves: tuple[str, ...]
    index: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One row of the family table.

    Attributes:
      architectures: names in `architectures` of config.json; the first is the one we write.
      model_types: names in `model_type`, consulted where `architectures` is absent.
      own_model_type: whether the model type alone tells the family, whatever the architecture.
      marker: part of a name in `architectures` or `auto_map` that tells the family.
      fields: field of `TargetConfig` -> key of config.json, or several keys, of which the first
        present counts.
      expert_fields: the same for `Experts`; empty where there are none.
      defaults: value of a field whose key is absent. Without a default the key is required.
      fixed: fields of `TargetConfig` that are the same in every checkpoint of the family.
      fixed_experts: the same for `Experts`.
      rotary_share: of each head, where the config has no `partial_rotary_factor`.
      required: key -> the values that mean the arithmetic of our trunk; absent or null is fine.
      weights: name of a tensor -> leaf of `models.target.param_shapes`, in which a layer's leaf
        has no `layers_`; several leaves share the rows of one tensor. A number between dots is
        written `{}`: layer first, then expert.
      harmless: regular expression of tensors that hold nothing learnt.
      block_length: default; None where the user or the checkpoint must tell.
      vocab_sizes: of the real checkpoints; the three ids below apply to these vocabularies only.
      parity: what logits were compared with.
      unverified: what could not be checked.
      note: what is decoded in another way than the reference does.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    own_model_type: bool = False
    marker: str = ""
    fields: Mapping[str, str | tuple[str, ...]]
    expert_fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    fixed_experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rotary_share: float = 1.0
    required: Mapping[str, tuple[Any, ...]]
    weights: Mapping[str, str | tuple[str, ...]]
    harmless: str = r".*\.rotary_emb\.inv_freq"
    block_length: int | None = None
    vocab_sizes: tuple[int, ...]
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    parity: str
    unverified: str
    note: str = ""

    def places(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
        """Where every tensor of a model goes, by name."""
        result = {}
        for pattern, names in self.weights.items():
            names = (names,) if isinstance(names, str) else names
            if "{}" not in pattern:
                if names[0] in shapes:
                    result[pattern] = Place(names, ())
                continue
            for layer, leaves, index in _layers(names, shapes):
                leading = shapes[leaves[0]][1 : pattern.count("{}")]
                for rest in itertools.product(*map(range, leading)):
                    result[pattern.format(layer, *rest)] = Place(leaves, (index, *rest))
        return result


def _layers(names, shapes) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """Number of each layer that has these leaves, their full names, its index in its stack."""
    begin = 0
    for stack in ("first", "layers"):
        leaves = tuple(f"{stack}_{name}" for name in names)
        number = shapes.get(f"{stack}_mlp_norm", (0,))[0]
        if leaves[0] in shapes:
            for index in range(number):
                yield begin + index, leaves, index
        begin += number
