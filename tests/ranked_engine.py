"""An engine of several ranks without vLLM: each writes and reads the KV of its own heads alone.

A head's KV is a mix of token, position, layer and head. A rank adds up what its heads and layers
hold of a sequence, and the sum over all ranks chooses the token. So a head's KV in a wrong place,
or of a wrong rank, changes the tokens, and the number of ranks does not.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvmesh.core.types import KvLayout
from kvmesh.engine.divided_pool import BlocksPart, DevicePart, DividedPool
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.mixing import split_mix
from kvmesh.engine.protocol import ModelSpec, SampledToken, SequenceChunk, StepResult
from kvmesh.engine.rank_lines import NUM_LINES
from kvmesh.engine.rank_part import RankPart
from kvmesh.engine.remote_part import PartServer, RemotePart
from tests.device_twin import TwinDriver

VOCAB_SIZE = 1000
HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM = 4, 2, 16, 1
_VALUES = 2 * HEAD_DIM  # key and value
VALUE_BYTES = 4
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


def device_part(part: RankPart, num_blocks: int, driver: TwinDriver) -> tuple[Tensor, DevicePart]:
    """Memory of a rank's device; of ranks other than 0 it is mapped, as that of other processes."""
    runs = part.runs(VALUE_BYTES)
    memory = driver.zeros(num_blocks * sum(size for _, size in runs))
    if not part.rank:
        return memory, DevicePart(driver, memory, runs)
    handle, offset = driver.export(memory)
    mapped = driver.open(handle, offset + memory.nbytes)[offset:]
    return memory, DevicePart(driver, mapped, runs, handle)


def remote_part(part: RankPart, num_blocks: int, driver: TwinDriver) -> tuple[Tensor, RemotePart]:
    """Memory of a rank's device on another host, which answers lines."""
    runs = part.runs(VALUE_BYTES)
    memory = driver.zeros(num_blocks * sum(size for _, size in runs))
    server = PartServer(driver, memory, runs)
    lines = []
    for _ in range(NUM_LINES):
        ours, theirs = socket.socketpair()
        server.serve(theirs)
        lines.append(ours)
    return memory, RemotePart(lines, runs)


Memory = Literal["shared", "devices", "hosts"]
"""Where ranks keep KV: in one pool, on devices of one host, or of a host for each rank."""


class RankedRunner:
    """A `ModelRunner`; its ranks take turns in this process.

    Args:
        memory: devices are imitated in host memory, and hosts by threads of this process.
    """

    def __init__(
        self,
        num_blocks: int,
        tensor_parallel: int = 1,
        stages: int = 1,
        *,
        memory: Memory = "shared",
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
        if memory == "shared":
            self.kv = pool = HostMemory(num_blocks, layout.block_bytes)
            self._ranks = [_Rank(part, pool.view, is_shared=True) for part in parts]
            return
        drivers = [TwinDriver() for _ in parts]
        kept: list[tuple[Tensor, BlocksPart]] = []
        for part, driver in zip(parts, drivers, strict=True):
            on_this_host = memory == "devices" or not part.rank
            kept.append((device_part if on_this_host else remote_part)(part, num_blocks, driver))
        self.kv = DividedPool(layout.block_bytes, num_blocks, drivers[0], [two for _, two in kept])
        self._ranks = [
            _Rank(part, values.numpy().data, is_shared=False)
            for part, (values, _) in zip(parts, kept, strict=True)
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
