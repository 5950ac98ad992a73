"""Sequences with prefix blocks that stay on another worker.

A remote prefix is a run of blocks whose KV this worker lacks. They are holes in the sequence's
table, and each layer queries the holder (`kernels/split_attention.py`). If that fails, the sequence
computes these blocks itself. No torch here.
Tests: tests/integration/test_remote_prefix.py.
"""

from __future__ import annotations

from kvmesh.engine.protocol import RemotePrefix
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.groups import HOLE


def leave_remote(sequence: Sequence, prefix: RemotePrefix, pool: BlockPool) -> None:
    """Lets a newly admitted sequence continue after a prefix that stays on another worker.

    Gives back the blocks that were taken for the prefix.
    """
    assert sequence.state in {SequenceState.HELD, SequenceState.RUNNING}, sequence.state
    blocks, table = prefix.blocks, sequence.blocks
    assert blocks.start * pool.block_size == sequence.num_computed, "nothing is computed yet"
    assert blocks.stop * pool.block_size < len(sequence.tokens), "the last token is computed here"
    pool.release([table[index] for index in blocks])
    table[blocks.start : blocks.stop] = [HOLE] * len(blocks)
    sequence.remote = prefix
    sequence.num_computed = sequence.num_cached = blocks.stop * pool.block_size


def come_back(sequence: Sequence, block_size: int) -> None:
    """Makes a sequence compute its remote prefix; its holes are filled as it grows."""
    assert sequence.remote is not None, "nothing is elsewhere"
    sequence.num_computed = sequence.num_cached = sequence.remote.blocks.start * block_size
    sequence.remote = None
