"""An engine of several ranks without vLLM: each writes and reads the KV of its own heads alone.

A head's KV is a mix of token, position, layer and head. A rank adds up what its heads and layers
hold of a sequence, and the sum over all ranks chooses the token. So a head's KV in a wrong place,
or of a wrong rank, changes the tokens, and the number of ranks does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.core.types import KvLayout
from kvmesh.engine.divided_pool import DevicePart, DividedPool
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.mixing import split_mix
from kvmesh.engine.protocol import ModelSpec, SampledToken, SequenceChunk, StepResult
from kvmesh.engine.rank_part import RankPart
from tests.device_twin import TwinDriver

VOCAB_SIZE = 1000
HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM = 4, 2, 16, 1
_VALUES = 2 * HEAD_DIM  # key and value
_VALUE_BYTES = 4
_ORDER = np.arange(HEADS * LAYERS, dtype=np.uint32).reshape(HEADS, LAYERS)
Cache = NDArray[np.uint32]


class _Rank:
    """A process's part of a step, over the pool of all or memory of its own."""

    def __init__(self, part: RankPart, memory: memoryview, *, is_shared: bool) -> None:
        values = np.frombuffer(memory, dtype=np.uint32)
        kept = part if is_shared else part.alone
        shape = (len(values) // kept.block_values, part.heads, BLOCK_SIZE, _VALUES)
        strides = [each * values.itemsize for each in kept.strides]
        self._caches: list[Cache] = [
            np.lib.stride_tricks.as_strided(values[kept.start(layer) :], shape, strides)
            for layer in range(part.layers)
        ]
        first_head, first_layer = part.rank % part.tensor_parallel * part.heads, part.first_layer
        self._names = _ORDER[
            first_head : first_head + part.heads, first_layer : first_layer + part.layers
        ]

    def compute(self, chunk: SequenceChunk) -> int:
        """Writes the chunk's KV; the sum over all positions so far."""
        total = 0
        for layer, cache in enumerate(self._caches):
            for position in range(chunk.start, chunk.end):
                block, slot = divmod(position, BLOCK_SIZE)
                word = split_mix(chunk.token_ids[position] << 32 | position) & 0xFFFF
                cache[chunk.block_table[block], :, slot] = (
                    word + (self._names[:, layer] << 16)[:, None]
                )
            for position in range(chunk.end):
                block, slot = divmod(position, BLOCK_SIZE)
                held = cache[chunk.block_table[block], :, slot].astype(np.uint64)
                # By head, so that heads in each other's places are noticed.
                total += int((held * (self._names[:, layer] + 1)[:, None]).sum())
        return total


def rank_part(rank: int, tensor_parallel: int, stages: int) -> RankPart:
    """The part of one of `tensor_parallel * stages` ranks."""
    heads, layers = HEADS // tensor_parallel, LAYERS // stages
    first_layer = rank // tensor_parallel * layers
    return RankPart(rank, tensor_parallel, heads, first_layer, layers, LAYERS, BLOCK_SIZE, _VALUES)


def device_part(part: RankPart, num_blocks: int) -> DevicePart:
    """Memory of a rank's device; of ranks other than 0 it is mapped, as that of other processes."""
    driver, runs = TwinDriver(), part.runs(_VALUE_BYTES)
    memory = driver.zeros(num_blocks * sum(size for _, size in runs))
    if not part.rank:
        return DevicePart(driver, memory, runs)
    handle, offset = driver.export(memory)
    mapped = driver.open(handle, offset + memory.nbytes)[offset:]
    return DevicePart(driver, mapped, runs, handle)


class RankedRunner:
    """A `ModelRunner`; its ranks take turns in this process.

    Args:
        on_devices: each rank keeps its KV on a device, imitated in host memory.
    """

    def __init__(
        self,
        num_blocks: int,
        tensor_parallel: int = 1,
        stages: int = 1,
        *,
        on_devices: bool = False,
    ) -> None:
        layout = KvLayout(
            model_fingerprint="ranked",
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            engine="fake",
            order="BHLNC",
        )
        self.spec = ModelSpec("ranked", VOCAB_SIZE, 4096, frozenset({0}), layout)
        self.partial_attention = None
        self.pair_share = 0.0
        self.adapter_places = None
        parts = [
            rank_part(rank, tensor_parallel, stages) for rank in range(tensor_parallel * stages)
        ]
        self.kv: HostMemory | DividedPool
        if not on_devices:
            self.kv = pool = HostMemory(num_blocks, layout.block_bytes)
            self._ranks = [_Rank(part, pool.view, is_shared=True) for part in parts]
            return
        kept = [device_part(part, num_blocks) for part in parts]
        self.kv = DividedPool(layout.block_bytes, num_blocks, kept)
        self._ranks = [
            _Rank(part, each.memory.numpy().data, is_shared=False)
            for part, each in zip(parts, kept, strict=True)
        ]

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """See `ModelRunner.execute`."""
        tokens: list[SampledToken | None] = []
        for chunk in chunks:
            total = sum(rank.compute(chunk) for rank in self._ranks)
            token = 1 + split_mix(total) % (VOCAB_SIZE - 1)
            tokens.append(SampledToken(token) if chunk.sample else None)
        self.kv.computed()
        return StepResult(tokens)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """See `ModelRunner.forget`."""

    def close(self) -> None:
        """See `ModelRunner.close`."""
        self.kv.close()
