"""Block hashes: the name of a full block's KV, chained so that it names the whole prefix.

    root       = H("kvmesh.root.1", namespace, cache_salt, adapter)   each field length-prefixed
    hash of b  = H(hash of the block before, or root; b's tokens as little-endian uint32)

H is BLAKE2b with 16 bytes of output. All workers and gateways must agree on every byte (why:
docs/adr/0003-block-hash.md). Tests: tests/unit/kv/test_hashing.py; golden values in
tests/contract/test_block_hash_golden.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import cast, overload

from kvmesh.core.block_names import cut_names
from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash

_ROOT_DOMAIN = b"kvmesh.root.1"
_EMPTY = blake2b(digest_size=BLOCK_HASH_BYTES)


@lru_cache(maxsize=1024)  # a few models and tenants, used by every request
def root_hash(namespace: str, *, cache_salt: str = "", adapter: str = "") -> BlockHash:
    """Returns the parent of a sequence's first block hash.

    Args:
        namespace: the layout's model fingerprint; KV of other models never matches.
        cache_salt: keeps tenants apart; a caller without it cannot probe for a prefix.
        adapter: name of the adapter whose weights the KV was computed with; empty is none.
    """
    digest = blake2b(_ROOT_DOMAIN, digest_size=BLOCK_HASH_BYTES)
    for text in (namespace, cache_salt, adapter):
        field = text.encode()
        digest.update(struct.pack("<I", len(field)))
        digest.update(field)
    return BlockHash(digest.digest())


def chain_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Returns the hashes of a sequence's full blocks, in order; a partial last block has none.

    Args:
        root: from `root_hash`, or the hash of the block before `token_ids`.
        block_size: token positions per block.

    Raises:
        ValueError: a token id is not a uint32.
    """
    return packed_hashes(root, packed_tokens(token_ids), block_size)


def packed_tokens(token_ids: Sequence[int]) -> bytes:
    """Packs token ids as the hash input: little-endian uint32.

    Raises:
        ValueError: a token id is not a uint32.
    """
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(f"token ids must be uint32: {error}") from error


def packed_hashes(root: BlockHash, packed: bytes, block_size: int) -> list[BlockHash]:
    """Variant of `chain_hashes` for packed token ids, for callers that hash them twice."""
    assert block_size > 0, f"block size {block_size}"
    stride = 4 * block_size
    hashes: list[bytes] = []
    parent: bytes = root
    for start in range(0, len(packed) - len(packed) % stride, stride):
        digest = _EMPTY.copy()  # takes half as long as a new one
        digest.update(parent + packed[start : start + stride])
        parent = digest.digest()
        hashes.append(parent)
    return cast("list[BlockHash]", hashes)


class HashChain:
    """The block hashes of one growing sequence.

    Holds the tokens of the partial last block only, so a decode step costs O(1).
    """

    def __init__(self, root: BlockHash, block_size: int, token_ids: Iterable[int] = ()) -> None:
        assert block_size > 0, f"block size {block_size}"
        self._block_size = block_size
        self._root = root
        self._hashes: list[BlockHash] = []
        self._tail: list[int] = []
        self.append(token_ids)

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """The hashes of all full blocks, in order; read only."""
        return self._hashes

    @property
    def num_tokens(self) -> int:
        """Number of tokens appended so far."""
        return len(self._hashes) * self._block_size + len(self._tail)

    def append(self, token_ids: Iterable[int]) -> list[BlockHash]:
        """Adds tokens and returns the hash of each block that became full, in order.

        Raises:
            ValueError: a token id is not a uint32 (noticed when its block is full).
        """
        tail = [*self._tail, *token_ids]
        parent = self._hashes[-1] if self._hashes else self._root
        full = chain_hashes(parent, tail, self._block_size)
        self._tail = tail[len(full) * self._block_size :]
        self._hashes += full
        return full


class JoinedHashes(Sequence[BlockHash]):
    """Joined hashes, as a message carries them; single hashes are sliced out on access.

    Attributes:
        joined: 16 bytes per hash.

    Raises:
        ProtocolError: the length is not a multiple of 16 bytes.
    """

    __slots__ = ("joined",)

    def __init__(self, joined: bytes) -> None:
        _check_length(joined)
        self.joined = joined

    def __len__(self) -> int:
        return len(self.joined) // BLOCK_HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockHash]: ...

    def __getitem__(self, index: int | slice) -> BlockHash | Sequence[BlockHash]:
        size = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(size)
            if step == 1:  # stays joined, as a message will carry it
                return JoinedHashes(self.joined[BLOCK_HASH_BYTES * start : BLOCK_HASH_BYTES * stop])
            return [self[at] for at in range(start, stop, step)]
        if not -size <= index < size:
            raise IndexError(index)
        start = index % size * BLOCK_HASH_BYTES
        return BlockHash(self.joined[start : start + BLOCK_HASH_BYTES])

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(split_hashes(self.joined))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, JoinedHashes):
            return self.joined == other.joined
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))


def join_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """Joins hashes into one byte string, the form that messages carry."""
    return hashes.joined if isinstance(hashes, JoinedHashes) else b"".join(hashes)


def _check_length(joined: bytes) -> None:
    if len(joined) % BLOCK_HASH_BYTES:
        raise ProtocolError(
            "hash_length", f"{len(joined)} bytes are not a multiple of {BLOCK_HASH_BYTES}"
        )


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Splits a byte string of `join_hashes` into hashes.

    Raises:
        ProtocolError: the length is not a multiple of 16 bytes.
    """
    _check_length(joined)
    return cut_names(joined)
