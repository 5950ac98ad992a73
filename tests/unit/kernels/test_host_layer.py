"""Halves of a layer in one call give what their parts give, to the bit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvmesh.kernels import host, host_layer, layer_ops
from kvmesh.kernels.dispatch import HostAttention
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.linear import Linear, make_linear
from kvmesh.kernels.plan import RaggedBatch

HIDDEN, BLOCK_SIZE, LAYER = 128, 16, 1
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    # The first test compiles: seconds alone, and a minute on a machine that is busy.
    pytest.mark.timeout(240),
]


def made_linear(outputs: int, inputs: int, dtype: torch.dtype, *, has_bias: bool) -> Linear:
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    made = make_linear((torch.randn(outputs, inputs) / inputs**0.5).to(dtype), bias)
    if not made.panels:
        pytest.skip("weights are not read in panels here")
    return made


def row_counts(dtype: torch.dtype) -> list[int]:
    return [rows for rows in (1, 2, 3, 4, 7, 20, 64) if rows <= host.most_rows(dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_mlp(threads: int, has_bias: bool, dtype: torch.dtype) -> None:
    gate_up = made_linear(2 * 192, HIDDEN, dtype, has_bias=has_bias)
    down = made_linear(HIDDEN, 192, dtype, has_bias=has_bias)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in row_counts(dtype):
            x = torch.randn(rows, HIDDEN).to(dtype)
            assert host_layer.has_gated_mlp(x, gate_up, down)
            expected = down(layer_ops.silu_and_mul(gate_up(x)))
            assert torch.equal(host_layer.gated_mlp(x, gate_up, down), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_an_mlp_does_not_take(dtype: torch.dtype) -> None:
    gate_up = made_linear(2 * 192, HIDDEN, dtype, has_bias=False)
    down = made_linear(HIDDEN, 192, dtype, has_bias=False)
    for rows in (0, host.most_rows(dtype) + 1):
        x = torch.zeros(rows, HIDDEN, dtype=dtype)
        assert not host_layer.has_gated_mlp(x, gate_up, down)
    x = torch.zeros(1, HIDDEN, dtype=dtype)
    # Gates end within a panel, so that a panel is no gate's or up's alone.
    odd, back = (
        made_linear(2 * 96, HIDDEN, dtype, has_bias=False),
        made_linear(128, 96, dtype, has_bias=False),
    )
    assert not host_layer.has_gated_mlp(x, odd, back)
    plain = Linear(torch.ones(2 * 192, HIDDEN, dtype=dtype), None, packed=False)
    assert not host_layer.has_gated_mlp(x, plain, down)


@dataclass(frozen=True)
class Heads:
    """What attention of a test is like."""

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    window: int = 0
    has_sinks: bool = False
    has_norm: bool = False
    has_bias: bool = False


def rows_of(lens: list[int], chunk: int = 1) -> RaggedBatch:
    """Sequences that compute their last position; the last one computes `chunk` of them."""
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    ids = iter(torch.randperm(sum(counts)).tolist())
    tables = tuple(tuple(next(ids) for _ in range(count)) for count in counts)
    starts = [*range(len(lens)), len(lens) - 1 + chunk]
    num_decode = len(lens) if chunk == 1 else len(lens) - 1
    return RaggedBatch(tuple(starts), tuple(lens), tables, num_decode, BLOCK_SIZE)


def both_ways(heads: Heads, lens: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, bool]:
    """In one call and part by part, and whether the KV that they leave is the same."""
    num_heads, dim = heads.kv_heads * heads.group, heads.head_dim
    width = (num_heads + 2 * heads.kv_heads) * dim
    qkv = made_linear(width, HIDDEN, dtype, has_bias=heads.has_bias)
    output = made_linear(HIDDEN, num_heads * dim, dtype, has_bias=heads.has_bias)
    norm = torch.rand(num_heads + heads.kv_heads, dim).to(dtype) if heads.has_norm else None
    sinks = torch.randn(num_heads) if heads.has_sinks else None
    spec = HeadSpec(dim**-0.5, heads.window, sinks, norm)
    cos, sin = (torch.rand(len(lens), 1, dim).to(dtype) for _ in range(2))
    rope, batch = RopeRows(cos, sin), rows_of(lens)
    shape = (sum(map(len, batch.block_tables)), 2, 2, BLOCK_SIZE, heads.kv_heads, dim)
    one, other = (torch.randn(shape, generator=seeded()).to(dtype) for _ in range(2))
    h = torch.randn(len(lens), HIDDEN).to(dtype)
    whole = HostAttention(batch, one).run_projected(h, qkv, output, LAYER, spec, rope)
    assert whole is not None
    parts = HostAttention(batch, other).run(qkv(h).view(len(lens), -1, dim), LAYER, spec, rope)
    return whole, output(parts.flatten(1)), torch.equal(one, other)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(),
        Heads(group=5, has_bias=True),
        Heads(head_dim=128, window=30, has_norm=True),
        Heads(kv_heads=1, group=4, head_dim=32, has_sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 2])
def test_attention(threads: int, heads: Heads, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in row_counts(dtype):
            lens = [1 + 37 * row % 150 for row in range(rows)]
            whole, parts, is_same_kv = both_ways(heads, lens, dtype)
            assert torch.equal(whole, parts)
            assert is_same_kv
    finally:
        torch.set_num_threads(before)


def test_chunks_of_prompts_go_part_by_part() -> None:
    batch, kv = rows_of([5, 9], chunk=3), torch.zeros(2, 2, 2, BLOCK_SIZE, 2, 64)
    qkv = made_linear(8 * 64, HIDDEN, torch.float32, has_bias=False)
    output = made_linear(HIDDEN, 4 * 64, torch.float32, has_bias=False)
    rope = RopeRows(torch.ones(4, 1, 64), torch.zeros(4, 1, 64))
    attention = HostAttention(batch, kv)
    assert (
        attention.run_projected(torch.ones(4, HIDDEN), qkv, output, 0, HeadSpec(1.0), rope) is None
    )
