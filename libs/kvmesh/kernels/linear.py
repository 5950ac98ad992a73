"""Matrix products with weights that do not change, packed once where that pays.

oneDNN's own layout of a weight is read 1.4 to 2.4 times as fast as a plain one on the CPU, fp32
above all. The operators are private to torch, so a weight stays plain when they are not there or
refuse. Tests: tests/unit/kernels/test_linear.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Rows that the layout is chosen for; one that suits a decode batch also suits one row and many.
_TYPICAL_ROWS = 32


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight and its bias.

    Attributes:
        weight: [outputs, inputs], or the packed form of it.
        bias: [outputs] or None.
        packed: `weight` is in oneDNN's layout.
    """

    weight: Tensor
    bias: Tensor | None
    packed: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]."""
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return out
        return functional.linear(x, self.weight, self.bias)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Packs a weight on the CPU; elsewhere it is used as it is.

    Args:
        weight: [outputs, inputs]; a packed one is a copy.
    """
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        return Linear(packed, bias, packed=True)
    return Linear(weight, bias, packed=False)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and this CPU multiply packed weights of the dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    weight = torch.ones(16, 16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        out = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(out, torch.full_like(out, 16))
