from __future__ import annotations

import pytest
import torch

from kvmesh.kernels import host
from kvmesh.kernels.latent import (
    StepLatent,
    causal_attention,
    decode_on_cpu,
    latent_decode_attention,
)
from kvmesh.kernels.plan import RaggedBatch
from tests.unit.kernels.no_copies import no_copies

SIZE, LAYERS, RANK, WIDTH, HEADS = 4, 3, 6, 8, 5
SCALE = 0.3


def filled(
    tables: list[list[int]], lens: list[int], layer: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A pool whose unwritten places are NaN, and the vectors of each sequence."""
    torch.manual_seed(3)
    kv = torch.full((20, LAYERS, SIZE, WIDTH), torch.nan)
    contexts = [torch.randn(length, WIDTH) for length in lens]
    for table, context in zip(tables, contexts, strict=True):
        for position, vector in enumerate(context):
            kv[table[position // SIZE], layer, position % SIZE] = vector
    return kv, contexts


def naive(q: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ context.T * SCALE, dim=-1) @ context[:, :RANK]


def test_decode_sees_its_own_context_only() -> None:
    tables = [[3, 9, 1, 17], [5, 2], [11]]
    lens = [14, 8, 1]
    kv, contexts = filled(tables, lens, layer=1)
    batch = RaggedBatch([0, 1, 2, 3], lens, tables, num_decode=3, block_size=SIZE)
    q = torch.randn(3, HEADS, WIDTH)
    out = StepLatent(batch, kv).decode(q, 1, scale=SCALE, rank=RANK)
    for index, context in enumerate(contexts):
        torch.testing.assert_close(out[index], naive(q[index], context))


def test_rows_are_written_to_their_slots_and_chunks_see_what_was_before() -> None:
    tables = [[3, 9], [5, 2, 8]]
    kv, contexts = filled(tables, [6, 10], layer=2)
    before = kv.clone()
    rows = torch.cat([contexts[0][5:], contexts[1][3:]])
    kv[9, 2, 1] = torch.nan
    kv[[5, 2, 2, 2, 2, 8, 8], 2, [3, 0, 1, 2, 3, 0, 1]] = torch.nan
    batch = RaggedBatch([0, 1, 8], [6, 10], tables, num_decode=1, block_size=SIZE)
    latent = StepLatent(batch, kv)
    with no_copies():  # all that the host knows is on the device before the first layer
        latent.write(rows, 2)
        latent.decode(torch.ones(1, HEADS, WIDTH), 2, scale=SCALE, rank=RANK)
        ((span, vectors),) = latent.chunks(2)
    assert torch.equal(kv.nan_to_num(), before.nan_to_num())
    assert (span.start, span.stop) == (1, 8)
    assert torch.equal(vectors, contexts[1])


def test_causal_attention_of_the_last_rows() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(9, 2, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 3)
    whole = causal_attention(q, k, v, 0.5)
    torch.testing.assert_close(causal_attention(q[4:], k, v, 0.5), whole[4:])
    first = torch.softmax(torch.einsum("hd,khd->hk", q[2], k[:3]) * 0.5, dim=-1)
    torch.testing.assert_close(whole[2], torch.einsum("hk,khd->hd", first, v[:3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 20), (96, 64), (40, 72)])
@pytest.mark.parametrize(("queries", "context"), [(1, 1), (5, 5), (70, 70), (3, 150)])
def test_causal_attention_is_the_same_by_the_library_and_by_torch(
    queries: int,
    context: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(2)
    q, k = (torch.randn(rows, HEADS, key_dim).to(dtype) for rows in (queries, context))
    v = torch.randn(context, HEADS, value_dim).to(dtype)
    found = causal_attention(q, k, v, SCALE)
    assert found.shape == (queries, HEADS, value_dim)
    monkeypatch.setattr(host, "prefill_head_dim", lambda *_: None)
    exact = causal_attention(q.float(), k.float(), v.float(), SCALE)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 6, 7, 12])
@pytest.mark.parametrize("size", [5, 48])
def test_decode_by_the_library_equals_the_twin(size: int, heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(heads)
    # Places that nothing was written to hold what is no number.
    kv = torch.full((40, 2, size, 48), torch.nan, dtype=dtype)
    lens = torch.tensor([1, 37, 5 * size])
    tables = torch.randperm(40)[:24].view(3, 8)
    for table, length in zip(tables, lens.tolist(), strict=True):
        for position in range(length):
            kv[table[position // size], 1, position % size] = torch.randn(48).to(dtype)
    q = torch.randn(3, heads, 48).to(dtype)
    found = decode_on_cpu(q, kv, 1, tables, lens, scale=SCALE, rank=32)
    exact = latent_decode_attention(q.float(), kv.float(), 1, tables, lens, scale=SCALE, rank=32)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), exact, rtol=tolerance, atol=tolerance)
