"""What KV can be kept in, and in which order. Tests: tests/unit/core/test_types.py.

Orders name the axes of KV memory, outermost first: blocks, layers, keys and values (2), positions
(N), heads, and what a head keeps of a position (D). vLLM's C is its keys and values together.
"""

from __future__ import annotations

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""What a model can be computed in."""

KV_DTYPE_BYTES = {**DTYPE_BYTES, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""What its KV can be kept in."""

OWN_ENGINE, OWN_ORDER = "kvmesh", "BL2NHD"
"""Our engine, and its order."""
