"""Descriptions of KV memory layouts for people, and of the differences between two.

Tests: tests/unit/transfer/test_protocol.py, tests/unit/scheduler/test_fleet.py.
"""

from __future__ import annotations

from dataclasses import fields

from kvmesh.core.types import KvLayout


def layout_difference(theirs: KvLayout, ours: KvLayout) -> str:
    """Names the fields that differ, with both values."""
    differences = [
        f"{field.name} {getattr(theirs, field.name)} there, {getattr(ours, field.name)} here"
        for field in fields(KvLayout)
        if getattr(theirs, field.name) != getattr(ours, field.name)
    ]
    return "; ".join(differences)


def layout_words(layout: KvLayout) -> str:
    """Describes a layout without its fingerprint."""
    return (
        f"{layout.engine} {layout.order}, {layout.dtype}, rank {layout.tp_rank} of "
        f"{layout.tp_size}, blocks of {layout.block_size} positions in {layout.num_layers} layers "
        f"with {layout.num_kv_heads} heads of {layout.head_dim}"
    )
