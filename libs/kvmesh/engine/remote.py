"""Sequences of whose prefix some blocks stay on another worker.

A remote prefix is a run of blocks that this worker holds no KV of: in the sequence's table they are
holes, and in each layer the holder is asked (`kernels/split_attention.py`). When it fails, the
sequence computes these blocks after all. No torch here.
Tests: tests/integration/test_remote_prefix.py.
"""

from __future__ import annotations

from kvmesh.engine.protocol import RemotePrefix
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.groups import HOLE


def leave_remote(sequence: Sequence, prefix: RemotePrefix, pool: BlockPool) -> None:
    """Lets a sequence that was just admitted go on behind a prefix that stays elsewhere.

    The blocks that were taken for the prefix are given back.
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
    """Makes a sequence compute what it left elsewhere; holes are filled as it grows."""
    assert sequence.remote is not None, "nothing is elsewhere"
    sequence.num_computed = sequence.num_cached = sequence.remote.blocks.start * block_size
    sequence.remote = None
