"""The attention kernels compile in every dtype and fit the shared memory of their device, with no
device. Run by test_triton_kernels.py in a process of its own, without the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmesh.kernels import attention

# Most that one program may have, by architecture; sm_89 and sm_120 have as little as sm_86.
SHARED_MEMORY_BYTES = {86: 99 << 10, 90: 227 << 10}
CONSTANTS: dict[str, Any] = {"BLOCK_SIZE": 16, "GROUP": 4, "UPCAST": False}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "decode": (attention._decode_kernel, {"GROUP_TILE": 16}),
    "static decode": (attention._decode_kernel, {"GROUP_TILE": 16}),
    "prefill": (attention._prefill_kernel, {"HAS_SINKS": True}),
}
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
CASES = [
    *((name, dtype, 128, 90) for name in ("decode", "prefill") for dtype in BYTES),
    ("static decode", "bf16", 128, 90),
    # Long heads and the widest dtype, where there is least room.
    ("prefill", "bf16", 256, 86),
    ("decode", "fp32", 256, 86),
    ("prefill", "fp32", 128, 86),
    ("prefill", "fp32", 256, 86),
]
POINTERS = {
    "tables_ptr": "*i32",
    "lens_ptr": "*i32",
    "starts_ptr": "*i32",
    "lse_ptr": "*fp32",
    "sinks_ptr": "*fp32",
}
STATIC_POINTERS = POINTERS | {"tables_ptr": "*i64", "lens_ptr": "*i64"}


@pytest.mark.parametrize(("name", "dtype", "head_dim", "arch"), CASES)
def test_compiles(name: str, dtype: str, head_dim: int, arch: int) -> None:
    kernel, more = KERNELS[name]
    constants = CONSTANTS | more | {"HEAD_DIM": head_dim, "DIM_TILE": head_dim}
    constants["TILE"] = attention.tile_of(head_dim, BYTES[dtype])
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
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[arch]
