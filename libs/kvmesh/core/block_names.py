"""What a worker tells of a block: names of 16 bytes that hold true of it. Pure.

    its hash            the worker has it: in its pool, or below
    `in_tier`           it is not in the pool; this is the fastest tier that has it
    `saved_state`       the state of the linear layers after it is saved, so a prefix can end there
    `TELLS_TIERS`       of no block: this worker tells in which tier its blocks are
    `TELLS_STATES`      likewise: its prefixes can be resumed only where it tells of a state

Names are told, stored, logged and taken back as hashes are, so that nobody in between needs to
know what they mean. Tests: tests/unit/kv/test_block_news.py.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash

HOST, DISK = "host", "disk"
"""Tiers below a pool, as they are called everywhere."""

TELLS_TIERS = BlockHash(b"tells its tiers.")
TELLS_STATES = BlockHash(b"tells of states.")
assert len(TELLS_TIERS) == len(TELLS_STATES) == BLOCK_HASH_BYTES

# A hash with its bytes moved round is another number of as many random bits, and as hard to meet by
# chance as the hash itself. Scripts of the store do the same.
HOST_TURN, DISK_TURN, STATE_TURN = 1, 2, 3


def in_host(block_hash: BlockHash) -> BlockHash:
    """The name that says: in host memory, and not in the pool."""
    return BlockHash(block_hash[HOST_TURN:] + block_hash[:HOST_TURN])


def in_disk(block_hash: BlockHash) -> BlockHash:
    """The name that says: on disk, and nowhere faster."""
    return BlockHash(block_hash[DISK_TURN:] + block_hash[:DISK_TURN])


def saved_state(block_hash: BlockHash) -> BlockHash:
    """The name that says: the state after this block is saved."""
    return BlockHash(block_hash[STATE_TURN:] + block_hash[:STATE_TURN])


IN_TIER: dict[str, Callable[[BlockHash], BlockHash]] = {HOST: in_host, DISK: in_disk}
"""By tier."""
