"""Matrix products with constant weights, which are packed once if that pays.

On the CPU oneDNN's own weight layout is read 1.4 to 2.4 times as fast as a plain one, especially
fp32. For a few rows `host.h` reads the same memory half as fast again. On a CPU for which oneDNN
has another layout (with AMX tiles for bf16), or no products of the dtype, `host.h` computes all
products. The operators are private to torch, so a weight stays plain if they are missing or fail,
and the layout is compared with the one that `host.h` expects.
Tests: tests/unit/kernels/test_linear.py.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.kernels import host, huge_memory

# Row count for which the layout is chosen; a decode batch's layout also suits one row and many.
_TYPICAL_ROWS = 32


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight and its bias.

    Attributes:
        weight: [outputs, inputs], or its packed form.
        bias: [outputs] or None.
        packed: whether `weight` is in oneDNN's layout.
        panels: address of the packed weight's memory for `host.few_rows`; 0 if that cannot read it.
            `few_rows` computes all products of weights that are not in oneDNN's layout.
    """

    weight: Tensor
    bias: Tensor | None
    packed: bool
    panels: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [rows, inputs] to [rows, outputs]."""
        if self.panels and (not self.packed or 0 < len(x) <= host.most_rows(x.dtype)):
            return host.few_rows(x.contiguous(), self.panels, self.bias, self.weight.shape[0])
        if self.packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return out
        return functional.linear(x, self.weight, self.bias)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Packs a weight on the CPU; on other devices uses it as it is.

    Args:
        weight: [outputs, inputs]; a packed weight is a copy of it.
    """
    if weight.device.type != "cpu":
        return Linear(weight, bias, packed=False)
    plain = weight.contiguous()
    panels = host.in_panels(plain) if host.takes_any_rows(plain) else None
    if panels is not None:
        address = panels.data_ptr()
        huge_memory.gather(address, panels.nbytes)
        return Linear(panels.view(plain.shape), bias, packed=False, panels=address)
    if not can_pack(weight.dtype):
        return Linear(weight, bias, packed=False)
    packed = _packed(plain)
    address, size = _memory_of(packed)
    if size:
        huge_memory.gather(address, size)
    return Linear(packed, bias, packed=True, panels=_address_of_panels(address, size, plain))


def _packed(plain: Tensor) -> Tensor:
    threads = torch.get_num_threads()
    # If threads outnumber panels, oneDNN makes narrower panels, which `host.h` does not read.
    fewer = max(1, min(threads, len(plain) // host.PANEL))
    torch.set_num_threads(fewer)
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain, _TYPICAL_ROWS)
    finally:
        torch.set_num_threads(threads)
    return packed


def _memory_of(packed: Tensor) -> tuple[int, int]:
    """Returns address and bytes; 0 and 0 if torch does not reveal them."""
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "data_ptr") and hasattr(operators, "_nbytes")):
        return 0, 0
    return operators.data_ptr(packed), operators._nbytes(packed)


def _address_of_panels(address: int, size: int, plain: Tensor) -> int:
    outputs, inputs = plain.shape
    if size != plain.nbytes or outputs % host.PANEL:
        return 0
    # oneDNN chooses the layout by the CPU, so it is checked: at both ends and in the middle, since
    # checking everything would take as long as packing.
    memory = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
    for first in (0, outputs // host.PANEL // 2 * host.PANEL, outputs - host.PANEL):
        panel = host.in_panels(plain[first : first + host.PANEL])
        if panel is None:
            return 0
        begin = first * inputs * plain.element_size()
        if not torch.equal(memory[begin : begin + panel.nbytes], panel.view(torch.uint8).flatten()):
            return 0
    return address


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Returns whether this build and this CPU multiply packed weights of the dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    weight = torch.ones(16, 16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        out = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(out, torch.full_like(out, 16))
