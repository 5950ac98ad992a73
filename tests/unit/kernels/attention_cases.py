"""Cases and checks that the interpreter and the GPU share: kernels against a plain fp32 softmax."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmesh.kernels.attention import paged_decode_attention
from kvmesh.kernels.dispatch import StepAttention
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.plan import RaggedBatch, padded_tables, slots_of
from kvmesh.kernels.prompt_attention import paged_prefill_attention
from kvmesh.kernels.static_decode import GroupRows, StaticAttention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAYER, LAYERS = 1, 2


@dataclass(frozen=True)
class Case:
    """Shapes of one launch; `chunks` are (cached positions, new positions)."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    num_splits: int = 1
    window: int = 0
    has_sinks: bool = False
    cap: float = 0.0

    def __str__(self) -> str:
        return self.name


DECODE_CASES = (
    Case("one position", ((0, 1),)),
    Case("ragged, partial last blocks", ((4, 1), (79, 1), (15, 1))),
    Case("no groups, odd block size", ((12, 1), (70, 1)), group=1, block_size=5),
    Case("group of three, odd head size", ((64, 1), (65, 1)), kv_heads=1, group=3, head_dim=24),
    Case("splits, some of them empty", ((150, 1), (3, 1)), kv_heads=1, num_splits=3),
    Case("splits before the window", ((250, 1), (3, 1)), kv_heads=1, num_splits=4, window=20),
    Case("one part and sinks", ((70, 1), (3, 1)), has_sinks=True),
    Case("a window within a tile", ((150, 1), (3, 1)), num_splits=2, window=40),
    Case("sinks", ((70, 1), (3, 1)), num_splits=2, has_sinks=True),
    Case("long heads", ((40, 1),), kv_heads=1, head_dim=256),
    Case("bent", ((70, 1), (3, 1)), num_splits=2, cap=0.7),
    Case("bent, window and sinks", ((70, 1), (3, 1)), window=20, has_sinks=True, cap=0.7),
)
PREFILL_CASES = (
    Case("one chunk, nothing cached", ((0, 37),), kv_heads=1),
    Case("ragged with cached prefixes", ((16, 5), (0, 3), (70, 11)), kv_heads=1),
    Case("longer than a tile", ((10, 67),), kv_heads=1, group=1),
    Case("group of three, odd sizes", ((7, 9),), kv_heads=1, group=3, head_dim=24, block_size=6),
    Case("a window, some tiles before it", ((140, 70),), kv_heads=1, group=1, window=50),
    Case("several tiles of queries", ((70, 150),), kv_heads=1, group=1),
    Case("a window over whole tiles", ((250, 140),), kv_heads=1, group=1, window=290),
    Case("sinks and a window", ((5, 9), (0, 3)), kv_heads=1, window=4, has_sinks=True),
    Case("long heads", ((3, 34),), kv_heads=1, group=1, head_dim=256),
    Case("bent", ((5, 9), (0, 3)), kv_heads=1, cap=0.7),
    Case("bent, a window", ((70, 40),), kv_heads=1, window=50, cap=0.7),
)


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; slots outside the contexts are NaN."""

    q: Tensor
    kv: Tensor
    tables: list[list[int]]
    lens: list[int]
    starts: list[int]
    sinks: Tensor | None
    cap: float = 0.0


def make_inputs(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    lens = [cached + new for cached, new in case.chunks]
    counts = [-(-length // case.block_size) for length in lens]
    ids = list(range(sum(counts) + 2))
    random.Random(2).shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    shape = (sum(counts) + 2, LAYERS, 2, case.block_size, case.kv_heads, case.head_dim)
    kv = torch.full(shape, torch.nan)
    for table, length in zip(tables, lens, strict=True):
        for position in range(length):
            block, offset = table[position // case.block_size], position % case.block_size
            kv[block, LAYER, :, offset] = torch.randn(shape[2:3] + shape[4:], generator=generator)
    starts = [0]
    for _, new in case.chunks:
        starts.append(starts[-1] + new)
    q = torch.randn(starts[-1], case.kv_heads * case.group, case.head_dim, generator=generator)
    sinks = torch.randn(q.shape[1], generator=generator).to(device) if case.has_sinks else None
    return Inputs(q.to(device, dtype), kv.to(device, dtype), tables, lens, starts, sinks, case.cap)


def expected(inputs: Inputs, scale: float, window: int) -> Tensor:
    """One query, one head at a time, in fp64: its own errors are none of the kernel's."""
    kv = inputs.kv.double().cpu()[:, LAYER]
    size, kv_heads = kv.shape[2], kv.shape[3]
    q = inputs.q.double().cpu()
    out = torch.empty_like(q)
    for sequence, length in enumerate(inputs.lens):
        first, last = inputs.starts[sequence], inputs.starts[sequence + 1]
        table = inputs.tables[sequence]
        slots = [(table[p // size], p % size) for p in range(length)]
        keys = torch.stack([kv[block, 0, offset] for block, offset in slots])
        values = torch.stack([kv[block, 1, offset] for block, offset in slots])
        for row in range(first, last):
            seen = length - (last - row) + 1
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // kv_heads)
                first_seen = max(0, seen - window) if window else 0
                scores = keys[first_seen:seen, kv_head] @ q[row, head] * scale
                if inputs.cap:
                    scores = inputs.cap * torch.tanh(scores / inputs.cap)
                if inputs.sinks is not None:
                    scores = torch.cat([scores, inputs.sinks[head : head + 1].cpu()])
                weights = torch.softmax(scores, dim=0)[: seen - first_seen]
                out[row, head] = weights @ values[first_seen:seen, kv_head]
    return out.float()


def check_decode(case: Case, dtype: torch.dtype, device: str, *, static: bool = False) -> None:
    """`static`: as a captured step launches it, which does not know how long contexts are."""
    ids = torch.int64 if static else torch.int32
    inputs, scale = make_inputs(case, dtype, device), case.head_dim**-0.5
    out = paged_decode_attention(
        inputs.q,
        inputs.kv,
        LAYER,
        torch.tensor(padded_tables(inputs.tables), dtype=ids, device=device),
        torch.tensor(inputs.lens, dtype=ids, device=device),
        max_context_len=0 if static else max(inputs.lens),
        num_splits=case.num_splits,
        scale=scale,
        window=case.window,
        sinks=inputs.sinks,
        cap=inputs.cap,
    )
    assert_close(out, inputs, scale, dtype, case.window)


def check_prefill(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs, scale = make_inputs(case, dtype, device), case.head_dim**-0.5
    out = paged_prefill_attention(
        inputs.q,
        inputs.kv,
        LAYER,
        torch.tensor(padded_tables(inputs.tables), dtype=torch.int32, device=device),
        torch.tensor(inputs.starts, dtype=torch.int32, device=device),
        torch.tensor(inputs.lens, dtype=torch.int32, device=device),
        max_query_len=max(new for _, new in case.chunks),
        scale=scale,
        window=case.window,
        sinks=inputs.sinks,
        cap=inputs.cap,
    )
    assert_close(out, inputs, scale, dtype, case.window)


def assert_close(
    out: Tensor, inputs: Inputs, scale: float, dtype: torch.dtype, window: int
) -> None:
    assert out.dtype == dtype
    assert out.shape == inputs.q.shape
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        out.float().cpu(), expected(inputs, scale, window), atol=tolerance, rtol=tolerance
    )


def check_step(
    kind: Callable[[RaggedBatch, Tensor], StepAttention],
    case: Case,
    num_decode: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """A step of decode rows, then chunks, whose own keys and values are not in the pool yet."""
    full, scale = make_inputs(case, dtype, device), case.head_dim**-0.5
    kv, size = full.kv.clone(), case.block_size
    places = [
        (table[position // size], position % size)
        for table, length, (_, new) in zip(full.tables, full.lens, case.chunks, strict=True)
        for position in range(length - new, length)
    ]
    new_kv = torch.stack([full.kv[block, LAYER, :, offset] for block, offset in places])
    for block, offset in places:
        kv[block, LAYER, :, offset] = torch.nan
    batch = RaggedBatch(full.starts, full.lens, full.tables, num_decode, size)
    qkv = torch.cat([full.q, new_kv[:, 0], new_kv[:, 1]], dim=1)
    # No rotation: the expected values come from queries and keys as they are.
    still = torch.ones(len(qkv), 1, case.head_dim, dtype=dtype, device=device)
    rope = RopeRows(still, torch.zeros_like(still))
    spec = HeadSpec(scale, case.window, full.sinks, cap=case.cap)
    out = kind(batch, kv).run(qkv, LAYER, spec, rope)
    assert torch.equal(kv.nan_to_num(), full.kv.nan_to_num())
    assert_close(out, full, scale, dtype, case.window)


STATIC_CASES = [
    Case("static", ((70, 1), (3, 1), (16, 1), (0, 1))),
    Case("static window and sinks", ((70, 1), (30, 1), (5, 1)), window=20, has_sinks=True),
    Case("static bent", ((70, 1), (3, 1), (16, 1)), cap=0.7),
]


def static_rows(batch: RaggedBatch, device: torch.device) -> GroupRows:
    """The rows of a batch of decode steps, tables wider than any context."""
    tables = torch.from_numpy(padded_tables(batch.block_tables))
    wide = torch.nn.functional.pad(tables, (0, 3), value=int(tables[0, 0]))
    return GroupRows(
        slots=torch.from_numpy(slots_of(batch)).to(device),
        lens=torch.tensor(batch.context_lens, device=device),
        tables=wide.to(device),
    )


def static_attention(batch: RaggedBatch, kv: Tensor) -> StaticAttention:
    return StaticAttention(static_rows(batch, kv.device), kv)


def static_attention_by_kernel(batch: RaggedBatch, kv: Tensor) -> StaticAttention:
    return StaticAttention(static_rows(batch, kv.device), kv, by_kernel=True)
