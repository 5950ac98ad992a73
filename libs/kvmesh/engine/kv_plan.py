"""Assigns each layer's KV to a group and a slot in the group's blocks.

Every block of the pool has the same bytes, whatever group it serves. If all layers keep equally
much per position, every token group has as many layers as the rarest kind of layer. Kinds that keep
less per position have correspondingly more layers per group. A block packs as many states of linear
layers as fit, and blocks get more positions until at least one fits. A layer that reads another
layer's KV has that layer's place.
Tests: tests/unit/engine/test_kv_plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.core.kv_formats import DTYPE_BYTES
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import KvLayout
from kvmesh.engine.config import HeadShape, ModelConfig
from kvmesh.kv.groups import num_blocks_of
from kvmesh.kv.stages import Stages, state_kind, tiled

_STATE_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvPlace:
    """The place of one layer's KV.

    Attributes:
        group: token group; for a linear layer, index among the blocks of a state.
        slot: index of the layer within a block.
    """

    group: int
    slot: int


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Groups of a model and the shape of their blocks.

    Attributes:
        places: per layer, place of its keys and values if it keeps any, else of its state.
        state_places: places of the states of layers that carry one.
        block_layers: layers per block of a token group, except groups of `ModelConfig.full_heads`.
        heads: KV heads per token group.
        states_per_block: number of layers whose states one block holds.
        block_size: positions in a block of a token group.
    """

    groups: KvGroups
    places: tuple[KvPlace, ...]
    state_places: Mapping[int, KvPlace]
    block_layers: int
    heads: tuple[HeadShape, ...]
    states_per_block: int
    block_size: int


def plan_kv(config: ModelConfig, dtype: str, block_size: int) -> KvPlan:
    """Assigns layers to groups.

    Args:
        dtype: dtype of token groups; states are fp32.
        block_size: minimum positions in a block; more if a block could not hold a state.
    """
    linear = [layer for layer in range(config.num_layers) if config.is_linear(layer)]
    kinds: dict[int, list[int]] = {}
    for layer in range(config.num_layers):
        if config.has_attention(layer) and config.kv_source(layer) == layer:
            kinds.setdefault(config.windows[layer], []).append(layer)
    assert kinds, "a model has a layer with attention"
    values = _values_of_a_block(config, kinds)
    position_bytes = values * DTYPE_BYTES[dtype]
    state_bytes = config.state_values * _STATE_VALUE_BYTES
    if linear:
        fitting = num_blocks_of(state_bytes, position_bytes * block_size)
        block_size *= fitting
    places: dict[int, KvPlace] = {}
    windows: list[int] = []
    heads: list[HeadShape] = []
    # Layers with full attention come first, since others are told the hashes of the first group.
    for window in sorted(kinds):
        per_layer = _values_of(config, kinds[window][0])
        for index, layer in enumerate(kinds[window]):
            slot = index % (values // per_layer)
            if slot == 0:
                windows.append(window)
                heads.append(config.head_shape(layer))
            places[layer] = KvPlace(len(windows) - 1, slot)
    per_block = position_bytes * block_size // state_bytes if linear else 0
    states = {
        layer: KvPlace(index // per_block, index % per_block) for index, layer in enumerate(linear)
    }
    known = states | places
    # A layer that mixes no positions keeps nothing, so its place is unused.
    sources = (config.kv_source(layer) for layer in range(config.num_layers))
    return KvPlan(
        groups=KvGroups(tuple(windows), num_blocks_of(len(linear), per_block) if linear else 0),
        places=tuple(known.get(layer, KvPlace(0, 0)) for layer in sources),
        state_places=states,
        block_layers=values // config.kv_values,
        heads=tuple(heads),
        states_per_block=per_block,
        block_size=block_size,
    )


def _values_of(config: ModelConfig, layer: int) -> int:
    """Returns the number of values that an attention layer keeps per position."""
    return config.head_shape(layer).values if config.latent is None else config.kv_values


def _values_of_a_block(config: ModelConfig, kinds: Mapping[int, list[int]]) -> int:
    """Returns the values per position in a block of a token group: whole layers of each kind."""
    kept = {window: _values_of(config, layers[0]) for window, layers in kinds.items()}
    unit = math.lcm(*kept.values())
    return unit * min(-(-len(layers) * kept[each] // unit) for each, layers in kinds.items())


def kv_layout(config: ModelConfig, plan: KvPlan, *, dtype: str, fingerprint: str) -> KvLayout:
    """Returns the layout of KV blocks; a latent counts as keys and values of one half-size head."""
    latent = config.latent
    return KvLayout(
        model_fingerprint=fingerprint,
        dtype=dtype,
        block_size=plan.block_size,
        num_layers=plan.block_layers,
        num_kv_heads=config.num_kv_heads if latent is None else 1,
        head_dim=config.head_dim if latent is None else latent.width // 2,
    )


def kv_stages(config: ModelConfig, plan: KvPlan, dtype: str, block_bytes: int) -> Stages:
    """The order in which the model's layers fill blocks.

    Args:
        dtype: of token groups.
    """
    state_bytes = config.state_values * _STATE_VALUE_BYTES
    begins: list[tuple[int, int]] = []
    for layer in range(config.num_layers):
        state = plan.state_places.get(layer)
        if state is not None:
            begins.append((state_kind(state.group), state.slot * state_bytes))
        if config.has_attention(layer) and config.kv_source(layer) == layer:
            place = plan.places[layer]
            values = _values_of(config, layer) * plan.block_size
            begins.append((place.group, place.slot * values * DTYPE_BYTES[dtype]))
    return tiled(begins, block_bytes)
