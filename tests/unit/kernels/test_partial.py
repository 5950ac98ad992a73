"""Attention over parts of a context, and the parts joined."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kvmesh.kernels import host
from kvmesh.kernels.partial import (
    Part,
    bytes_of,
    causal_mask,
    gather_part,
    join_parts,
    partial_prefill,
    partial_reference,
)
from tests.native import needs_host_library

HEADS, KV_HEADS, DIM = 6, 2, 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in fp64; the queries are the last positions."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (each.double().transpose(0, 1) for each in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    mask = mask.tril(k.shape[1] - q.shape[1])
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3).transpose(0, 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("queries", "context", "cut"), [(1, 2, 1), (5, 40, 32), (33, 100, 16)])
def test_two_parts_joined_are_attention_over_all(
    queries: int, context: int, cut: int, dtype: torch.dtype
) -> None:
    q = random(queries, HEADS, DIM, dtype=dtype)
    k, v = (random(context, KV_HEADS, DIM, dtype=dtype) * (1 + i) for i in range(2))
    far = partial_prefill(q, k[:cut], v[:cut], 0.3)
    near = partial_prefill(q, k[cut:], v[cut:], 0.3, causal_mask(queries, context - cut, q))
    for out, lse in (far, near):
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    joined = join_parts(near, far, dtype)
    assert joined.dtype == dtype
    torch.testing.assert_close(
        joined.double(), whole(q, k, v), atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_equals_its_twin(dtype: torch.dtype, causal: bool) -> None:
    q, context = random(20, HEADS, DIM, dtype=dtype), 50
    k, v = (random(context, KV_HEADS, DIM, dtype=dtype) + i for i in range(2))
    mask = causal_mask(20, context, q) if causal else None
    out, lse = partial_prefill(q, k, v, 0.3, mask)
    grouped = q.view(20, KV_HEADS, -1, DIM).permute(1, 2, 0, 3)
    keys, values = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]
    twin, sums = partial_reference(grouped, keys, values, mask, 0.3)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        out, twin.permute(2, 0, 1, 3).reshape(q.shape), atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(
        lse, sums.permute(2, 0, 1).reshape(20, HEADS), atol=tolerance, rtol=tolerance
    )


def test_the_query_of_the_last_position_sees_all() -> None:
    assert causal_mask(1, 9, random(1)) is None
    mask = causal_mask(2, 3, random(1))
    assert mask is not None
    assert mask.tolist() == [[0, 0, -torch.inf], [0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "positions"), [(1, 64), (7, 64), (70, 130), (20, 20)])
@pytest.mark.parametrize("causal", [False, True])
@needs_host_library
def test_blocks_are_read_where_they_lie(
    dtype: torch.dtype, queries: int, positions: int, causal: bool
) -> None:
    kv = torch.full((12, 2, 2, 16, KV_HEADS, 32), torch.nan, dtype=dtype)
    blocks = torch.tensor([7, 3, 9, 1, 11, 5, 0, 2, 10][: -(-positions // 16)])
    both = random(2, positions, KV_HEADS, 32, dtype=dtype)
    for at in range(positions):
        kv[blocks[at // 16], 1, :, at % 16] = both[:, at]
    # Queries as the engine has them: beside keys and values.
    q = random(queries, HEADS + 2 * KV_HEADS, 32, dtype=dtype)[:, :HEADS]
    out, lse = host.partial_prefill(q, kv, 1, blocks, positions, 0.3, causal=causal)
    mask = causal_mask(queries, positions, q) if causal else None
    expected, sums = partial_prefill(q, both[0], both[1], 0.3, mask)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, sums, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_queries", [0, 5])
def test_a_part_is_the_same_however_it_is_read(
    num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = random(6, 2, 2, 16, KV_HEADS, 32)
    q = random(5, HEADS, 32)
    found = []
    for in_place in (host.has_attention(kv), False):
        monkeypatch.setattr(host, "has_attention", lambda kv, answer=in_place: answer)
        found.append(Part(kv, [4, 2], 25, num_queries).attend(q, 1, 0.3))
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=2e-6)


def test_an_empty_part_has_no_weight() -> None:
    out, lse = random(3, HEADS, DIM), random(3, HEADS)
    nothing = (torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    assert torch.equal(join_parts((out, lse), nothing, torch.float32), out)


def test_gather_takes_blocks_in_order_and_nothing_of_the_spare_slots() -> None:
    kv = torch.full((6, 2, 2, 4, KV_HEADS, DIM), torch.nan)
    positions = random(7, KV_HEADS, DIM)
    kv[4, 1, 0], kv[2, 1, 0, :3] = positions[:4], positions[4:]
    kv[4, 1, 1], kv[2, 1, 1, :3] = -positions[:4], -positions[4:]
    k, v = gather_part(kv, 1, torch.tensor([4, 2]), 7)
    assert torch.equal(k, positions)
    assert torch.equal(v, -positions)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bytes_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = random(4, 6, dtype=dtype)
    for each in (tensor, tensor[:, :3]):
        again = torch.frombuffer(bytearray(bytes_of(each)), dtype=dtype)
        assert torch.equal(again.view(each.shape), each)
