"""The block copy kernel compiles for sm_90, with no device. Run by test_triton_kernels.py in a
process of its own, without the interpreter.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmesh.kernels import block_copy

ALIGNED = [["tt.divisibility", 16]]


def ptx_of(word: str, tile: int, is_aligned: bool) -> str:
    signature = {"target_ptr": word, "source_ptr": word, "places_ptr": "*i64", "size": "i32"}
    constants = {"ALIGNED": is_aligned, "TILE": tile}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {(argument,): ALIGNED for argument in range(4)}
    source = ASTSource(block_copy._copy_kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


def test_aligned_pieces_move_16_bytes_per_thread() -> None:
    ptx = ptx_of("*i64", block_copy._TILE_WORDS, is_aligned=True)
    assert ptx.count("ld.global.v2.b64") == ptx.count("st.global.v2.b64") > 0
    # The two numbers of a place are all that is loaded one by one.
    assert ptx.count("ld.global.b64") == 2
    assert ptx.count("st.global.b64") == 0


def test_odd_pieces_compile() -> None:
    assert "st.global" in ptx_of("*u8", block_copy._TILE_BYTES, is_aligned=False)
