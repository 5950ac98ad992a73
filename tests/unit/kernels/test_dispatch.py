from __future__ import annotations

import pytest
import torch

from kvmesh.kernels import host
from kvmesh.kernels.dispatch import ReferenceAttention, plan_attention
from kvmesh.kernels.plan import RaggedBatch
from tests.unit.kernels.attention_cases import (
    STATIC_CASES,
    Case,
    check_step,
    static_attention,
)

# Lengths far apart, so that decode rows fall into several buckets.
MIXED = ((700, 1), (690, 1), (3, 1), (16, 5), (0, 9))


@pytest.mark.parametrize(
    ("chunks", "num_decode"), [(MIXED, 3), (MIXED[:3], 3), (MIXED[3:], 0)], ids=str
)
def test_step_writes_then_attends(chunks: tuple[tuple[int, int], ...], num_decode: int) -> None:
    case = Case("mixed", chunks, block_size=8)
    check_step(ReferenceAttention, case, num_decode, torch.float32, "cpu")


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(
    ("chunks", "num_decode"), [(MIXED, 3), (MIXED[:3], 3), (MIXED[3:], 0)], ids=str
)
def test_a_step_whose_scores_are_bent(
    chunks: tuple[tuple[int, int], ...], num_decode: int, window: int
) -> None:
    case = Case("mixed", chunks, block_size=8, head_dim=64, window=window, cap=0.7)
    check_step(plan_attention, case, num_decode, torch.float32, "cpu")


@pytest.mark.parametrize("by_library", [True, False])
@pytest.mark.parametrize("case", STATIC_CASES, ids=str)
def test_static_step(case: Case, by_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_library:
        monkeypatch.setattr(host, "has_vectors", lambda _: False)
    check_step(static_attention, case, len(case.chunks), torch.float32, "cpu")


def test_the_host_takes_the_twins_for_heads_without_a_kernel() -> None:
    batch = RaggedBatch([0, 1], [1], [[0]], num_decode=1, block_size=4)
    attention = plan_attention(batch, torch.zeros(1, 1, 2, 4, 1, 8))
    assert type(attention) is ReferenceAttention
