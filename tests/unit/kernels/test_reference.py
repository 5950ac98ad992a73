from __future__ import annotations

import pytest
import torch

from kvmesh.kernels import attention_reference, reference
from tests.unit.kernels.attention_cases import (
    DECODE_CASES,
    LAYER,
    PREFILL_CASES,
    TOLERANCE,
    Case,
    assert_close,
    make_inputs,
)

DTYPES = list(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_computed_in_fp32(dtype: torch.dtype) -> None:
    # The squares of 300 overflow fp16.
    x = (torch.randn(3, 8) + 300).to(dtype)
    weight = torch.randn(8).to(dtype)
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    exact *= weight.float()
    out = reference.rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), exact, atol=1e-2, rtol=TOLERANCE[dtype])


def test_rms_norm_with_weights_per_head() -> None:
    x, weight = torch.randn(5, 3, 8), torch.randn(3, 8)
    out = reference.rms_norm(x, weight, 1e-6)
    for head in range(3):
        torch.testing.assert_close(out[:, head], reference.rms_norm(x[:, head], weight[head], 1e-6))


def test_rope_rotates_pairs_by_the_angle_of_the_position() -> None:
    x = torch.randn(4, 2, 6)
    angles = torch.randn(4, 3)
    cos = torch.cat([angles.cos(), angles.cos()], -1)[:, None]
    signed_sin = torch.cat([-angles.sin(), angles.sin()], -1)[:, None]
    pairs = torch.complex(x[..., :3], x[..., 3:])
    turned = pairs * torch.polar(torch.ones(4, 3), angles)[:, None]
    torch.testing.assert_close(
        reference.apply_rope(x, cos, signed_sin), torch.cat([turned.real, turned.imag], -1)
    )


def test_silu_and_mul() -> None:
    gate_up = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    expected = [1 * torch.tensor(1.0).sigmoid() * 3, -2 * torch.tensor(-2.0).sigmoid() * 4]
    torch.testing.assert_close(reference.silu_and_mul(gate_up), torch.tensor([expected]))


def test_write_kv_touches_its_slots_and_no_others() -> None:
    kv = torch.zeros(4, 3, 2, 5, 2, 4)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    slots = torch.tensor([2 * 5 + 4, 0 * 5 + 1, 3 * 5 + 0])
    reference.write_kv(k, v, kv, 1, reference.key_slots(slots, kv))
    expected = torch.zeros_like(kv)
    for row, (block, offset) in enumerate([(2, 4), (0, 1), (3, 0)]):
        expected[block, 1, 0, offset] = k[row]
        expected[block, 1, 1, offset] = v[row]
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_attention(case: Case, dtype: torch.dtype) -> None:
    inputs, scale = make_inputs(case, dtype, "cpu"), case.head_dim**-0.5
    plan = attention_reference.plan_decode(inputs.tables, inputs.lens, inputs.kv, case.window)
    out = attention_reference.decode_attention(
        inputs.q, inputs.kv, LAYER, plan, scale, inputs.sinks, cap=inputs.cap
    )
    assert_close(out, inputs, scale, dtype, case.window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill_attention(case: Case, dtype: torch.dtype) -> None:
    inputs, scale = make_inputs(case, dtype, "cpu"), case.head_dim**-0.5
    parts = []
    for sequence, (cached, new) in enumerate(case.chunks):
        table, context_len = inputs.tables[sequence], cached + new
        positions = [
            (table[p // case.block_size], p % case.block_size) for p in range(cached, context_len)
        ]
        k, v = (
            torch.stack([inputs.kv[block, LAYER, which, offset] for block, offset in positions])
            for which in (0, 1)
        )
        rows = slice(inputs.starts[sequence], inputs.starts[sequence + 1])
        plan = attention_reference.plan_prefill(table, context_len, new, inputs.kv, case.window)
        parts.append(
            attention_reference.prefill_attention(
                inputs.q[rows], k, v, inputs.kv, LAYER, plan, scale, inputs.sinks, cap=inputs.cap
            )
        )
    assert_close(torch.cat(parts), inputs, scale, dtype, case.window)


def test_merge_of_parts_is_attention_over_all() -> None:
    scores, values = torch.randn(2, 9), torch.randn(9, 4)
    cuts = [slice(0, 4), slice(4, 4), slice(4, 9)]
    out = torch.stack([torch.softmax(scores[:, cut], -1) @ values[cut] for cut in cuts], dim=1)
    lse = torch.stack([scores[:, cut].logsumexp(-1) for cut in cuts], dim=1)
    torch.testing.assert_close(
        attention_reference.merge_partials(out, lse), torch.softmax(scores, -1) @ values
    )
