from __future__ import annotations

import pytest
import torch

from kvmesh.engine.layers import GatedMlp
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
