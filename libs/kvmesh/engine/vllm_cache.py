"""vLLM's KV cache in memory that we give, in blocks of one range of bytes each.

This module uses vLLM's internals. Tests: tests/vllm/test_equality.py, tests/vllm/test_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.utils import allocate_kv_cache

from kvmesh.core.errors import ConfigError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.engine.kv_shape import SPARE_BLOCKS
from kvmesh.engine.rank_part import RankPart
from kvmesh.engine.vllm_memory import CacheMemory
from kvmesh.engine.vllm_messages import EngineRequest, VllmStep
from kvmesh.kv.stages import state_kind


class GivenCache:
    """The cache of one rank.

    Attributes, set when vLLM has its cache:
        part: the part of each block that this rank has. Its layers are those that a block has
            room for; with several groups, a block has layers of one of them.
        groups: groups of layers, those that see every position first.
        order: for each group of vLLM, its kind in `groups`: see `kv.groups.ArrivingBlock`.
        dtype: of keys and values.
    """

    part: RankPart
    groups: KvGroups
    order: tuple[int, ...]
    dtype: torch.dtype

    def __init__(
        self, request: EngineRequest, config: VllmConfig, memory: CacheMemory, rank: int
    ) -> None:
        self._request = request
        self._config = config
        self._memory = memory
        self._rank = rank

    @contextmanager
    def given(self) -> Iterator[None]:
        """Meanwhile vLLM takes its cache from here."""
        gpu_model_runner.allocate_kv_cache = self._allocate
        try:
            yield
        finally:
            gpu_model_runner.allocate_kv_cache = allocate_kv_cache

    def _allocate(
        self,
        config: KVCacheConfig,
        device: torch.device,
        layout: KVCacheLayout,
        kernel_block_sizes: list[int] | None = None,
    ) -> dict[str, Tensor]:
        """Takes the place of vLLM's `allocate_kv_cache`.

        Raises:
            ConfigError: some layers keep something else than keys and values, or of other sizes.
        """
        if config.num_blocks != self._request.num_blocks + SPARE_BLOCKS:
            # A small one, with which vLLM measures the memory of graphs.
            small: dict[str, Tensor] = allocate_kv_cache(config, device, layout, kernel_block_sizes)
            return small
        self.groups, self.order = _groups_of(config)
        # Without memory: this gives each layer's shape, and its place in memory of this rank alone.
        placed = allocate_kv_cache(config, torch.device("meta"), layout, kernel_block_sizes)
        states = {name for group in _state_groups(config) for name in group.layer_names}
        self.part = part = self._part_of(
            [each for name, each in placed.items() if name not in states]
        )
        value_bytes = self.dtype.itemsize
        own_bytes = part.alone.block_values * value_bytes
        part = part if self._memory.is_shared else part.alone
        block_bytes = part.block_values * value_bytes
        memory = self._memory.allocate(config.num_blocks * block_bytes)
        # With states a rank's part of a block is one range: several stages are refused.
        first_byte = part.rank * own_bytes if states else 0
        self._parts = memory.view(-1, block_bytes)[:, first_byte : first_byte + own_bytes]
        values, layer_values = memory.view(self.dtype), part.positions * part.content
        caches = {}
        for name, each in placed.items():
            if name in states:
                start = memory.storage_offset() + first_byte + each.storage_offset()
                strides = (block_bytes, *each.stride()[1:])
                caches[name] = memory.view(torch.int8).as_strided(each.shape, strides, start)
                continue
            start = values.storage_offset() + part.start(each.storage_offset() // layer_values)
            caches[name] = values.as_strided(each.shape, part.strides, start)
        return caches

    def prepare(self, step: VllmStep) -> None:
        """Sets this rank's part of blocks to zeros, and copies it, before a step is computed."""
        if step.cleared:
            self._parts[step.cleared] = 0
        self._copy(step.copied)

    def save(self, step: VllmStep) -> None:
        """Copies this rank's part of states, after a step was computed."""
        self._copy(step.saved)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            sources, targets = map(list, zip(*pairs, strict=True))
            self._parts[targets] = self._parts[sources]

    def _part_of(self, placed: Sequence[Tensor]) -> RankPart:
        """The part of each block that this rank has.

        Args:
            placed: caches of the layers that keep keys and values.

        Raises:
            ConfigError: a layer has none of its own, or blocks are not one range of bytes each.
        """
        some = placed[0]
        self.dtype = some.dtype
        _, heads, positions, content = some.shape
        layers, rest = divmod(some.stride(0), heads * positions * content)
        is_alike = all(
            each.shape == some.shape
            and each.stride(0) == some.stride(0)
            and each.stride()[2:] == (content, 1)
            for each in placed
        )
        if rest or not is_alike:
            raise ConfigError("this model's KV blocks are not one range of bytes each")
        first_layer, num_layers = _layers(self._config, layers)
        return RankPart(
            rank=self._rank,
            tensor_parallel=self._request.tensor_parallel,
            heads=heads,
            first_layer=first_layer,
            layers=layers,
            num_layers=num_layers,
            positions=positions,
            content=content,
        )


def _layers(config: VllmConfig, num_here: int) -> tuple[int, int]:
    """The first layer whose KV is in this process, and the number of layers of all stages.

    Raises:
        ConfigError: some layers of a model that is divided have no KV of their own.
    """
    if config.parallel_config.pipeline_parallel_size == 1:
        return 0, num_here
    first, end = config.model_config.get_layers_start_end_indices(config.parallel_config)
    if end - first != num_here:
        raise ConfigError(
            f"layers {first} to {end - 1} of this model keep {num_here} caches, so it cannot be "
            "divided: set engine.pipeline_parallel 1"
        )
    return first, int(config.model_config.get_total_num_hidden_layers())


def _state_groups(config: KVCacheConfig) -> list[KVCacheGroupSpec]:
    return [each for each in config.kv_cache_groups if isinstance(each.kv_cache_spec, MambaSpec)]


def _groups_of(config: KVCacheConfig) -> tuple[KvGroups, tuple[int, ...]]:
    """The groups of layers in our order, and for each group of vLLM its kind of blocks.

    Raises:
        ConfigError: some layers keep something else than keys, values and states.
    """
    specs = [each.kv_cache_spec for each in config.kv_cache_groups]
    known = (FullAttentionSpec, SlidingWindowSpec, MambaSpec)
    if other := sorted({type(each).__name__ for each in specs if not isinstance(each, known)}):
        raise ConfigError(
            "engine vllm serves models whose layers all keep attention's KV alike, or a state, "
            f"not {', '.join(other)}"
        )
    tokens = [index for index, each in enumerate(specs) if not isinstance(each, MambaSpec)]
    states = [index for index, each in enumerate(specs) if isinstance(each, MambaSpec)]
    if not tokens:
        raise ConfigError("engine vllm serves models of which some layer keeps attention's KV")

    def window_of(index: int) -> int:
        spec = specs[index]
        return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0

    # Other services find a worker's prefixes by the block hashes of its first group. So layers that
    # keep all positions come first.
    tokens.sort(key=window_of)
    kinds = {index: group for group, index in enumerate(tokens)}
    kinds |= {index: state_kind(part) for part, index in enumerate(states)}
    groups = KvGroups(tuple(map(window_of, tokens)), len(states))
    return groups, tuple(kinds[index] for index in range(len(specs)))
