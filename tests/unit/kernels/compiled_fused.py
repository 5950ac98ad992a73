"""The fused Triton kernels compile for sm_90 in every dtype, with no device. Run by
test_triton_kernels.py in a process of its own, without the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmesh.kernels import fused

KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "add_rms_norm": (fused._add_rms_norm_kernel, {"TILE": 4096, "HAS_DELTA": True}),
    "silu_and_mul": (fused._silu_and_mul_kernel, {"TILE": 1024}),
    "rope_and_write": (
        fused._rope_and_write_kernel,
        {"BLOCK_SIZE": 16, "KV_HEADS": 8, "HEAD_DIM": 128, "HALF_TILE": 64, "HAS_NORM": True},
    ),
}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", list(KERNELS))
def test_compiles(name: str, dtype: str) -> None:
    kernel, constants = KERNELS[name]
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument == "slots_ptr":
            signature[argument] = "*i64"
        elif argument.endswith("_ptr"):
            signature[argument] = f"*{dtype}"
        else:
            signature[argument] = "fp32" if argument == "eps" else "i32"
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
