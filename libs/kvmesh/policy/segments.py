"""Segments: the unit of the cluster-wide KV pool. How long one must be, what it is called, where it
lives.

Source: TokenLake 4.2 (length), 4.3 (placement). Tests: tests/unit/policy/test_segments.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvmesh.core.types import BlockHash


@dataclass(frozen=True, slots=True)
class AttentionHardware:
    """What a remote query costs, per layer.

    Attributes:
        latency_s: alpha_net, of one message.
        net_bytes_per_s: B_net.
        memory_bytes_per_s: B_mem, of the device that holds the KV.
        flops: F, of that device.
        hidden_size: d; keys and values of a token have 2 d numbers of two bytes.
    """

    latency_s: float
    net_bytes_per_s: float
    memory_bytes_per_s: float
    flops: float
    hidden_size: int

    @property
    def query_s(self) -> float:
        """T_comm: query out, partial output back."""
        return 2 * self.latency_s + 4 * self.hidden_size / self.net_bytes_per_s

    @property
    def token_s(self) -> float:
        """k_comp: attention of one query to one token of KV, bound by compute or by memory."""
        return max(
            4 * self.hidden_size / self.flops, 4 * self.hidden_size / self.memory_bytes_per_s
        )


def threshold_tokens(hardware: AttentionHardware) -> float:
    """Shortest segment whose attention takes as long as asking for it remotely."""
    return hardware.query_s / hardware.token_s


def segment_blocks(hardware: AttentionHardware, block_size: int) -> int:
    """Blocks per segment: the threshold, rounded up to whole blocks."""
    return max(-int(-threshold_tokens(hardware) // block_size), 1)


def segment_hashes(block_hashes: Sequence[BlockHash], blocks: int) -> tuple[BlockHash, ...]:
    """Names of the whole segments of a prefix; a tail that fills none has no name.

    A segment is called by its last block's hash, which names the whole prefix up to there.
    """
    return tuple(block_hashes[blocks - 1 :: blocks])


def striped_homes(
    segments: Sequence[BlockHash], num_workers: int, first: int = 0
) -> Iterator[tuple[BlockHash, int]]:
    """The segments of a prefix from `first` on, with the worker that each lives on.

    Each lives where its hash says, or on the next worker that none of its row has: of every N
    segments in a row no two live on one worker. Whoever reads a long prefix thus reads as much of
    every worker, where the hash alone leaves it to chance; and a segment's home still follows from
    its prefix.

    Args:
        segments: from the start of the prompt.
    """
    taken: set[int] = set()
    for index in range(first - first % num_workers, len(segments)):
        if index % num_workers == 0:
            taken.clear()
        worker = home(segments[index], num_workers)
        while worker in taken:
            worker = (worker + 1) % num_workers
        taken.add(worker)
        if index >= first:
            yield segments[index], worker


def home(segment: BlockHash, num_workers: int) -> int:
    """Index of the worker that a normal segment lives on.

    The paper takes the hash modulo N, which moves nearly all segments when N changes. A consistent
    hash spreads as evenly and moves one in N + 1 when a worker is added at the end.

    Source: Lamping and Veach, A Fast, Minimal Memory, Consistent Hash Algorithm, 2014.
    """
    assert num_workers > 0, "no worker"
    key = int.from_bytes(segment[:8], "little")
    bucket, candidate = 0, 0
    while candidate < num_workers:
        bucket = candidate
        key = (key * 2862933555777941757 + 1) & 0xFFFF_FFFF_FFFF_FFFF
        candidate = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket
