import hashlib
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash
from kvmesh.kv.hashing import (
    HashChain,
    JoinedHashes,
    chain_hashes,
    join_hashes,
    root_hash,
    split_hashes,
)

ROOT = root_hash("model")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_chain_follows_its_definition() -> None:
    parent: bytes = ROOT
    for start, block_hash in zip((0, 4, 8), chain_hashes(ROOT, range(14), 4), strict=True):
        tokens = b"".join(struct.pack("<I", token) for token in range(start, start + 4))
        parent = hashlib.blake2b(parent + tokens, digest_size=16).digest()
        assert block_hash == parent


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(chain_hashes(ROOT, range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_root_separates_fields() -> None:
    roots = {
        root_hash("ab"),
        root_hash("a", cache_salt="b"),
        root_hash("a", adapter="b"),
        root_hash("", cache_salt="ab"),
        root_hash("", adapter="ab"),
        root_hash("", cache_salt="a", adapter="b"),
    }
    assert len(roots) == 6


@pytest.mark.parametrize("name", ["namespace", "cache_salt", "adapter"])
def test_root_depends_on_what_a_field_says(name: str) -> None:
    """Of two tenants or models with names of one length neither finds the other's KV."""
    fields = {"namespace": "model", "cache_salt": "salt", "adapter": "lora"}
    roots = {root_hash(**{**fields, name: text}) for text in ("one", "two", "six")}
    assert len(roots) == 3


@pytest.mark.parametrize("position", [0, 5, 8])
def test_a_changed_token_changes_its_block_and_all_later_ones(position: int) -> None:
    tokens = list(range(12))
    before = chain_hashes(ROOT, tokens, 4)
    tokens[position] += 1
    after = chain_hashes(ROOT, tokens, 4)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [block < position // 4 for block in range(3)]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_must_be_uint32(token: int) -> None:
    with pytest.raises(ValueError, match="uint32"):
        chain_hashes(ROOT, [0, token], 2)


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=4), size=st.integers(1, 5))
def test_incremental_chain_equals_whole_chain(
    tokens: list[int], cuts: list[int], size: int
) -> None:
    edges = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    chain = HashChain(ROOT, size)
    grown = [h for a, b in pairwise(edges) for h in chain.append(tokens[a:b])]
    assert grown == list(chain.hashes) == chain_hashes(ROOT, tokens, size)
    assert chain.num_tokens == len(tokens)
    assert HashChain(ROOT, size, tokens).hashes == chain.hashes


@given(st.lists(st.binary(min_size=BLOCK_HASH_BYTES, max_size=BLOCK_HASH_BYTES), max_size=5))
def test_split_inverts_join(raw: list[bytes]) -> None:
    hashes = [BlockHash(item) for item in raw]
    assert split_hashes(join_hashes(hashes)) == hashes


BOUNDS = st.none() | st.integers(-7, 7)


@given(st.integers(0, 5), BOUNDS, BOUNDS, st.sampled_from([None, 1, 2, -1, -3]))
def test_joined_hashes_are_sliced_as_a_list_is(
    count: int, start: int | None, stop: int | None, step: int | None
) -> None:
    hashes = chain_hashes(ROOT, range(4 * count), 4)
    joined, part = JoinedHashes(join_hashes(hashes)), slice(start, stop, step)
    assert list(joined[part]) == hashes[part]
    assert join_hashes(joined[part]) == join_hashes(hashes[part])


def test_split_refuses_a_cut_hash() -> None:
    with pytest.raises(ProtocolError) as caught:
        split_hashes(bytes(BLOCK_HASH_BYTES + 1))
    assert caught.value.reason == "hash_length"
