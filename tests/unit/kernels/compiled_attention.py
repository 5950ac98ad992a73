"""The Triton kernels compile for sm_90 in every dtype, with no device. Run by
test_triton_kernels.py in a process of its own, without the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmesh.kernels import attention

SHARED_MEMORY_BYTES = 227 << 10
CONSTANTS: dict[str, Any] = {
    "BLOCK_SIZE": 16,
    "GROUP": 4,
    "HEAD_DIM": 128,
    "DIM_TILE": 128,
    "UPCAST": False,
}
KERNELS = {
    "decode": (attention._decode_kernel, {"GROUP_TILE": 16, "TILE": attention.DECODE_TILE}),
    "static decode": (attention._decode_kernel, {"GROUP_TILE": 16, "TILE": attention.DECODE_TILE}),
    "prefill": (attention._prefill_kernel, {"TILE": attention.PREFILL_TILE, "HAS_SINKS": True}),
}
POINTERS = {
    "tables_ptr": "*i32",
    "lens_ptr": "*i32",
    "starts_ptr": "*i32",
    "lse_ptr": "*fp32",
    "sinks_ptr": "*fp32",
}
STATIC_POINTERS = POINTERS | {"tables_ptr": "*i64", "lens_ptr": "*i64"}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", list(KERNELS))
def test_compiles(name: str, dtype: str) -> None:
    kernel, tiles = KERNELS[name]
    constants = CONSTANTS | tiles
    pointers = STATIC_POINTERS if name == "static decode" else POINTERS
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            # Partial results of decode are fp32 whatever the pool holds.
            parts = argument == "out_ptr" and name != "prefill"
            signature[argument] = "*fp32" if parts else pointers.get(argument, f"*{dtype}")
        else:
            signature[argument] = "fp32" if argument == "scale_log2" else "i32"
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
