"""Data types and axis orders of KV memory. Tests: tests/unit/core/test_types.py.

Orders name the axes of KV memory, outermost first: blocks, layers, keys and values (2), positions
(N), heads (H), and the elements of a head at a position (D). vLLM's C is K and V together.
"""

from __future__ import annotations

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of the data types in which a model can be computed."""

KV_DTYPE_BYTES = {**DTYPE_BYTES, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element of the data types in which KV can be stored."""

OWN_ENGINE, OWN_ORDER = "kvmesh", "BL2NHD"
"""Name of KVMesh's own engine, and its axis order."""
