"""Triton kernels of latents, states and experts compile for sm_90, with no device. Run by
test_triton_kernels.py in a process of its own, without the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmesh.kernels import delta_rule, grouped_gemm, latent_attention, lightning

DELTA: dict[str, Any] = {"KEY_DIM": 128, "KEY_TILE": 128, "VALUE_DIM": 128, "VALUE_TILE": 32}
HEADS, CHANNELS = {"PER_CHANNEL": False}, {"PER_CHANNEL": True}
# Shared memory of one program on sm_90.
SHARED_BYTES = 227 << 10
KERNELS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...], int]] = {
    "latent_decode": (
        latent_attention._latent_decode_kernel,
        {
            "BLOCK_SIZE": 16,
            "RANK": 512,
            "RANK_TILE": 512,
            "ROPE": 64,
            "ROPE_TILE": 64,
            "HEAD_TILE": 16,
            "TILE": 32,
            "UPCAST": False,
        },
        ("bf16", "fp16"),
        8,
    ),
    "delta_step": (delta_rule._step_kernel, DELTA | HEADS, ("fp32",), 4),
    "delta_scan": (delta_rule._scan_kernel, DELTA | HEADS | {"CHUNK": 16}, ("fp32",), 4),
    "channel_step": (delta_rule._step_kernel, DELTA | CHANNELS, ("fp32",), 4),
    "channel_scan": (delta_rule._scan_kernel, DELTA | CHANNELS | {"CHUNK": 16}, ("fp32",), 4),
    "lightning_step": (lightning._step_kernel, DELTA, ("fp32",), 4),
    "lightning_scan": (lightning._scan_kernel, DELTA | {"CHUNK": 16}, ("fp32",), 4),
    "grouped_gemm": (
        grouped_gemm._grouped_kernel,
        {"ROW_TILE": 16, "COLUMN_TILE": 64, "DEPTH_TILE": 32, "UPCAST": False},
        ("bf16", "fp32"),
        4,
    ),
    "grouped_gemm, many rows": (
        grouped_gemm._grouped_kernel,
        {"ROW_TILE": 64, "COLUMN_TILE": 128, "DEPTH_TILE": 64, "UPCAST": False},
        ("bf16", "fp32"),
        8,
    ),
}
INTEGERS = {"tables_ptr", "lens_ptr", "rows_ptr", "expert_ptr", "first_ptr", "end_ptr"}
FLOATS = {"out_ptr": "latent_decode", "lse_ptr": "latent_decode"}
CASES = [(name, dtype) for name, (_, _, dtypes, _) in KERNELS.items() for dtype in dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_compiles(name: str, dtype: str) -> None:
    kernel, constants, _, warps = KERNELS[name]
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in INTEGERS:
            signature[argument] = "*i64"
        elif FLOATS.get(argument) == name:
            signature[argument] = "*fp32"
        elif argument.endswith("_ptr"):
            signature[argument] = f"*{dtype}"
        else:
            signature[argument] = "fp32" if argument == "scale_log2" else "i32"
    source = ASTSource(kernel, signature, constants)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_BYTES
