"""Names of 16 bytes that a worker publishes about a block. Pure.

    the block's hash    the worker has the block, in its pool or in a tier below
    `IN_TIER`           the block is not in the pool; this is the fastest tier that has it
    `saved_state`       a prefix can end with the block: the linear layers' state after it is
                        saved, and the window layers have what the next query sees
    `TELLS_TIERS`       about the worker: it publishes the tiers of its blocks
    `TELLS_STATES`      about the worker: its prefixes resume only where it publishes so

Names are published, stored, logged and withdrawn like hashes, so the services in between need not
know their meaning. Tests: tests/unit/kv/test_block_news.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash

HOST, DISK = "host", "disk"
"""Names of the tiers below a pool."""

TELLS_TIERS = BlockHash(b"tells its tiers.")
TELLS_STATES = BlockHash(b"tells of states.")
assert len(TELLS_TIERS) == len(TELLS_STATES) == BLOCK_HASH_BYTES

# Rotating the bytes of a hash gives another number with as many random bits, so it collides as
# rarely as the hash itself. The store's scripts rotate in the same way.
HOST_TURN, DISK_TURN, STATE_TURN = 1, 2, 3


def cut_names(joined: bytes) -> list[BlockHash]:
    """Returns the names in a message's joined names, whose length is a multiple of theirs."""
    starts = range(0, len(joined), BLOCK_HASH_BYTES)
    # One cast for all: calling `BlockHash` for each takes longer than to cut it out.
    return cast("list[BlockHash]", [joined[at : at + BLOCK_HASH_BYTES] for at in starts])


def in_host(block_hash: BlockHash) -> BlockHash:
    """Returns the name for "in host memory, not in the pool"."""
    return BlockHash(block_hash[HOST_TURN:] + block_hash[:HOST_TURN])


def in_disk(block_hash: BlockHash) -> BlockHash:
    """Returns the name for "on disk, and in no faster tier"."""
    return BlockHash(block_hash[DISK_TURN:] + block_hash[:DISK_TURN])


def saved_state(block_hash: BlockHash) -> BlockHash:
    """Returns the name for "a prefix that ends with this block can be resumed"."""
    return BlockHash(block_hash[STATE_TURN:] + block_hash[:STATE_TURN])


IN_TIER: dict[str, Callable[[BlockHash], BlockHash]] = {HOST: in_host, DISK: in_disk}
"""Function of each tier that makes the name of a block in it."""
