"""vLLM's KV cache in memory that we give, in blocks of one range of bytes each.

This module uses vLLM's internals. Tests: tests/vllm/test_equality.py, tests/vllm/test_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheLayout,
    SlidingWindowSpec,
)
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.utils import allocate_kv_cache

from kvmesh.core.errors import ConfigError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.engine.kv_shape import SPARE_BLOCKS
from kvmesh.engine.rank_part import RankPart
from kvmesh.engine.vllm_memory import CacheMemory
from kvmesh.engine.vllm_messages import EngineRequest


class GivenCache:
    """The cache of one rank.

    Attributes, set when vLLM has its cache:
        part: the part of each block that this rank has. Its layers are those that a block has
            room for; with several groups, a block has layers of one of them.
        groups: groups of layers, those that see every position first.
        order: for each group of vLLM, its number in `groups`.
    """

    part: RankPart
    groups: KvGroups
    order: tuple[int, ...]

    def __init__(
        self, request: EngineRequest, config: VllmConfig, memory: CacheMemory, rank: int
    ) -> None:
        self._request = request
        self._config = config
        self._memory = memory
        self._rank = rank

    @contextmanager
    def given(self) -> Iterator[None]:
        """VLLM takes its cache from here meanwhile."""
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
        self.part = part = self._part_of(placed)
        part = part if self._memory.is_shared else part.alone
        some = next(iter(placed.values()))
        memory = self._memory.allocate(config.num_blocks * part.block_values * some.itemsize)
        values = memory.view(some.dtype)
        layer_values = part.positions * part.content
        caches = {}
        for name, each in placed.items():
            start = values.storage_offset() + part.start(each.storage_offset() // layer_values)
            caches[name] = values.as_strided(each.shape, part.strides, start)
        return caches

    def _part_of(self, placed: Mapping[str, Tensor]) -> RankPart:
        """The part of each block that this rank has.

        Args:
            placed: caches of the layers.

        Raises:
            ConfigError: a layer has none of its own, or blocks are not one range of bytes each.
        """
        some = next(iter(placed.values()))
        _, heads, positions, content = some.shape
        layers, rest = divmod(some.stride(0), heads * positions * content)
        is_alike = all(
            each.shape == some.shape
            and each.stride(0) == some.stride(0)
            and each.stride()[2:] == (content, 1)
            for each in placed.values()
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


def _groups_of(config: KVCacheConfig) -> tuple[KvGroups, tuple[int, ...]]:
    """The groups of layers in our order, and for each group of vLLM its number in it.

    Raises:
        ConfigError: some layers keep something else than keys and values.
    """
    specs = [each.kv_cache_spec for each in config.kv_cache_groups]
    if any(type(each) not in {FullAttentionSpec, SlidingWindowSpec} for each in specs):
        kinds = ", ".join(sorted({type(each).__name__ for each in specs}))
        raise ConfigError(
            f"engine vllm serves models whose layers all keep attention's KV alike, not {kinds}"
        )
    windows = [each.sliding_window if isinstance(each, SlidingWindowSpec) else 0 for each in specs]
    # Others are told the hashes of the first group, so it is one that keeps most.
    ours = sorted(range(len(windows)), key=windows.__getitem__)
    order = tuple(ours.index(group) for group in range(len(windows)))
    return KvGroups(tuple(windows[group] for group in ours)), order
