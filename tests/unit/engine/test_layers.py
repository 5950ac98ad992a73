from __future__ import annotations

import pytest
import torch

from kvmesh.engine.layers import GatedMlp, StackedExperts
from kvmesh.kernels.layer_ops import silu_and_mul
from kvmesh.kernels.linear import make_linear


@pytest.mark.parametrize("rows", [1, 512, 513, 1100])
def test_an_mlp_takes_long_prompts_in_parts(rows: int) -> None:
    asked: list[int] = []

    def activation(gate_up: torch.Tensor) -> torch.Tensor:
        asked.append(len(gate_up))
        return silu_and_mul(gate_up)

    gate_up, down = torch.randn(64, 16), torch.randn(16, 32)
    mlp = GatedMlp(make_linear(gate_up), make_linear(down), activation)
    h = torch.randn(rows, 16)
    gate, up = (h @ gate_up.T).chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up) @ down.T
    torch.testing.assert_close(mlp.run(h), expected, atol=1e-3, rtol=1e-3)
    assert sum(asked) == rows
    assert max(asked) <= 512, "what is between the products stays small"


def test_what_experts_give_a_row_is_rounded_once() -> None:
    # At 256 numbers in bf16 lie 2 apart: added one by one, seven times 0.9 would be lost.
    gate_up = torch.full((8, 2, 16), 0.25, dtype=torch.bfloat16)
    down = torch.full((8, 16, 1), 0.9, dtype=torch.bfloat16)
    down[3] = 256.0
    experts = StackedExperts(gate_up, down, lambda inner: torch.ones_like(inner[:, :1]))
    h = torch.ones(2, 16, dtype=torch.bfloat16)
    chosen = torch.stack([torch.arange(8), torch.arange(8).flip(0)])
    found = experts.run(h, torch.ones(2, 8), chosen)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[262.0] * 16] * 2
