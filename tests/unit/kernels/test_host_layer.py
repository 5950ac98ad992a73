"""Layers and halves of one in one call give what their parts give, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvmesh.kernels import host, host_layer, layer_ops
from kvmesh.kernels.dispatch import HostAttention
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.linear import Linear, make_linear
from kvmesh.kernels.plan import RaggedBatch
from tests.native import needs_host_library

HIDDEN, BLOCK_SIZE, LAYER = 128, 16, 1
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = needs_host_library


@pytest.fixture(params=[1, 2, 3], ids="threads {}".format)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


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
@pytest.mark.usefixtures("threads")
def test_mlp(has_bias: bool, dtype: torch.dtype) -> None:
    gate_up = made_linear(2 * 192, HIDDEN, dtype, has_bias=has_bias)
    down = made_linear(HIDDEN, 192, dtype, has_bias=has_bias)
    call = host_layer.MlpCall.of(gate_up, down)
    assert call is not None
    for rows in row_counts(dtype):
        x = torch.randn(rows, HIDDEN).to(dtype)
        assert host_layer.takes(x)
        expected = down(layer_ops.silu_and_mul(gate_up(x)))
        assert torch.equal(call.run(x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_takes_several_calls(dtype: torch.dtype) -> None:
    gate_up = made_linear(2 * 192, HIDDEN, dtype, has_bias=False)
    down = made_linear(HIDDEN, 192, dtype, has_bias=False)
    assert host_layer.takes(torch.zeros(host.most_rows(dtype), HIDDEN, dtype=dtype))
    for rows in (0, host.most_rows(dtype) + 1):
        assert not host_layer.takes(torch.zeros(rows, HIDDEN, dtype=dtype))
    # Gates end within a panel, so that a panel is no gate's or up's alone.
    odd = made_linear(2 * 96, HIDDEN, dtype, has_bias=False)
    assert host_layer.MlpCall.of(odd, made_linear(128, 96, dtype, has_bias=False)) is None
    plain = Linear(torch.ones(2 * 192, HIDDEN, dtype=dtype), None, packed=False)
    assert host_layer.MlpCall.of(plain, down) is None
    assert host_layer.AttentionCall.of(gate_up, plain, HeadSpec(1.0), 64, 0) is None


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
    cap: float = 0.0


def rows_of(lens: list[int], chunk: int = 1) -> RaggedBatch:
    """Sequences that compute their last position; the last one computes `chunk` of them."""
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    ids = iter(torch.randperm(sum(counts)).tolist())
    tables = tuple(tuple(next(ids) for _ in range(count)) for count in counts)
    starts = [*range(len(lens)), len(lens) - 1 + chunk]
    num_decode = len(lens) if chunk == 1 else len(lens) - 1
    return RaggedBatch(tuple(starts), tuple(lens), tables, num_decode, BLOCK_SIZE)


@dataclass
class Both:
    """The same layer twice, over KV of its own."""

    qkv: Linear
    output: Linear
    spec: HeadSpec
    rope: RopeRows
    h: Tensor
    attentions: tuple[HostAttention, HostAttention]
    kvs: tuple[Tensor, Tensor]
    head_dim: int

    def call(self, place: int = LAYER) -> host_layer.AttentionCall:
        made = host_layer.AttentionCall.of(self.qkv, self.output, self.spec, self.head_dim, place)
        assert made is not None
        return made

    def rows(self) -> host_layer.DecodeRows:
        rows = self.attentions[0].decode_rows
        assert rows is not None
        return rows

    def by_parts(self, h: Tensor) -> Tensor:
        heads = self.qkv(h).view(len(h), -1, self.head_dim)
        attended = self.attentions[1].run(heads, LAYER, self.spec, self.rope)
        return self.output(attended.flatten(1))


def both_ways(heads: Heads, lens: list[int], dtype: torch.dtype) -> Both:
    num_heads, dim = heads.kv_heads * heads.group, heads.head_dim
    width = (num_heads + 2 * heads.kv_heads) * dim
    norm = torch.rand(num_heads + heads.kv_heads, dim).to(dtype) if heads.has_norm else None
    sinks = torch.randn(num_heads) if heads.has_sinks else None
    cos, sin = (torch.rand(len(lens), 1, dim).to(dtype) for _ in range(2))
    batch = rows_of(lens)
    shape = (sum(map(len, batch.block_tables)), 2, 2, BLOCK_SIZE, heads.kv_heads, dim)
    one, other = (torch.randn(shape, generator=seeded()).to(dtype) for _ in range(2))
    return Both(
        made_linear(width, HIDDEN, dtype, has_bias=heads.has_bias),
        made_linear(HIDDEN, num_heads * dim, dtype, has_bias=heads.has_bias),
        HeadSpec(dim**-0.5, heads.window, sinks, norm, cap=heads.cap),
        RopeRows(cos, sin),
        torch.randn(len(lens), HIDDEN).to(dtype),
        (HostAttention(batch, one), HostAttention(batch, other)),
        (one, other),
        dim,
    )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(),
        Heads(group=5, has_bias=True),
        Heads(cap=0.7),
        Heads(head_dim=128, window=30, has_norm=True),
        Heads(kv_heads=1, group=4, head_dim=32, has_sinks=True),
    ],
    ids=str,
)
@pytest.mark.usefixtures("threads")
def test_attention(heads: Heads, dtype: torch.dtype) -> None:
    for rows in row_counts(dtype):
        lens = [1 + 37 * row % 150 for row in range(rows)]
        both = both_ways(heads, lens, dtype)
        whole = both.call().run(both.h, both.rows(), both.rope)
        assert torch.equal(whole, both.by_parts(both.h))
        assert torch.equal(*both.kvs)


@dataclass
class Made:
    """A layer over the pool of another one's test."""

    both: Both
    place: int
    gate_up: Linear
    down: Linear
    norms: tuple[Tensor, Tensor]

    def parts(self) -> host_layer.LayerParts:
        mlp = host_layer.MlpCall.of(self.gate_up, self.down)
        assert mlp is not None
        return host_layer.LayerParts(self.both.call(self.place), mlp, *self.norms, 1e-5)

    def by_parts(self, x: Tensor, delta: Tensor | None, shared: Both) -> Tensor:
        h = layer_ops.add_rms_norm(x, delta, self.norms[0], 1e-5)
        heads = self.both.qkv(h).view(len(h), -1, self.both.head_dim)
        attended = shared.attentions[1].run(heads, self.place, self.both.spec, shared.rope)
        mixed = self.both.output(attended.flatten(1))
        h = layer_ops.add_rms_norm(x, mixed, self.norms[1], 1e-5)
        return self.down(layer_ops.silu_and_mul(self.gate_up(h)))


def made_layer(both: Both, place: int, inner: int, dtype: torch.dtype) -> Made:
    gate_up = made_linear(2 * inner, HIDDEN, dtype, has_bias=False)
    down = made_linear(HIDDEN, inner, dtype, has_bias=False)
    first, second = (torch.rand(HIDDEN).to(dtype) for _ in range(2))
    return Made(both, place, gate_up, down, (first, second))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.usefixtures("threads")
def test_layers(has_delta: bool, dtype: torch.dtype) -> None:
    for rows in row_counts(dtype):
        lens = [1 + 53 * row % 130 for row in range(rows)]
        # The layer with more heads and a wider MLP comes later, so that memory is not the first's.
        shared = both_ways(Heads(group=2), lens, dtype)
        wider = both_ways(Heads(group=5, window=30, has_norm=True, has_bias=True), lens, dtype)
        layers = [made_layer(shared, 1, 192, dtype), made_layer(wider, 0, 320, dtype)]
        call = host_layer.LayersCall([layer.parts() for layer in layers])
        for count in (1, 2):
            delta = torch.randn(rows, HIDDEN).to(dtype) if has_delta else None
            x, other = shared.h.clone(), shared.h.clone()
            added = call.run(count, x, delta, shared.rows(), shared.rope)
            for layer in layers[:count]:
                delta = layer.by_parts(other, delta, shared)
            assert delta is not None
            assert torch.equal(added, delta)
            assert torch.equal(x, other), "the residual stream"
            assert torch.equal(*shared.kvs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.usefixtures("threads")
def test_norm_and_head(has_bias: bool, dtype: torch.dtype) -> None:
    head = made_linear(5 * 64, HIDDEN, dtype, has_bias=has_bias)
    norm = torch.rand(HIDDEN).to(dtype)
    call = host_layer.HeadCall.of(norm, 1e-5, head)
    assert call is not None
    for rows in row_counts(dtype):
        x, delta = (torch.randn(rows, HIDDEN).to(dtype) for _ in range(2))
        expected = head(layer_ops.add_rms_norm(x.clone(), delta, norm, 1e-5)).float()
        assert torch.equal(call.run(x, delta), expected)


def test_a_plain_head_has_no_call() -> None:
    head = Linear(torch.randn(320, HIDDEN), None, packed=False)
    assert host_layer.HeadCall.of(torch.rand(HIDDEN), 1e-5, head) is None


def test_chunks_of_prompts_go_part_by_part() -> None:
    kv = torch.zeros(2, 2, 2, BLOCK_SIZE, 2, 64)
    assert HostAttention(rows_of([5, 9], chunk=3), kv).decode_rows is None
    assert HostAttention(rows_of([5, 9]), kv).decode_rows is not None
