"""How two workers' KV memory differs. Tests: tests/unit/transfer/test_protocol.py."""

from __future__ import annotations

from dataclasses import fields

from kvmesh.core.types import KvLayout


def layout_difference(theirs: KvLayout, ours: KvLayout) -> str:
    """Names the fields that differ."""
    differences = [
        f"{field.name} {getattr(theirs, field.name)} there, {getattr(ours, field.name)} here"
        for field in fields(KvLayout)
        if getattr(theirs, field.name) != getattr(ours, field.name)
    ]
    return "; ".join(differences)
