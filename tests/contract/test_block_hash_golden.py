"""Block hashes are a wire format: these values hold for every version (ADR 0003).

They come from a second computation by the definition in the ADR, not from `kvmesh.kv.hashing`.
"""

import pytest

from kvmesh.kv.hashing import chain_hashes, root_hash

TOKENS = [*range(16), *range(2**32 - 16, 2**32), 7]

GOLDEN = [
    (
        ("kvmesh-tiny", "", ""),
        "3e2774007719af25afb707f12320efb3",
        ["e9bf5bb877c512ea7692a0e75fcf6c10", "0c379996ea8177d17ee77e61ee8b0059"],
    ),
    (
        ("kvmesh-tiny", "tenant-ä", "lora-1"),
        "484578a194e3e22cd21553eca09d320d",
        ["bc2420477beca18c8f9f275fcb953606", "f194980b0da267449a7f1568f994561c"],
    ),
]


@pytest.mark.parametrize(("fields", "root_hex", "hashes_hex"), GOLDEN)
def test_golden_hashes(fields: tuple[str, str, str], root_hex: str, hashes_hex: list[str]) -> None:
    namespace, cache_salt, adapter = fields
    root = root_hash(namespace, cache_salt=cache_salt, adapter=adapter)
    assert root.hex() == root_hex
    assert [block_hash.hex() for block_hash in chain_hashes(root, TOKENS, 16)] == hashes_hex
