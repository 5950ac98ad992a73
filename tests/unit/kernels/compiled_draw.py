"""The draw kernel compiles for sm_90, with no device. Run by test_triton_kernels.py in a process of
its own, without the interpreter.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmesh.kernels import draw

TYPES = {"logits_ptr": "*fp32", "best_ptr": "*fp32", "TILE": "constexpr"}


def test_compiles() -> None:
    kernel = draw._draw_kernel
    signature = {
        name: TYPES.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, {"TILE": draw._TILE})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.asm["cubin"]
