"""What a worker needs to follow structures: its model's tokenizer, where it has one.

Tests: tests/unit/runtime/test_worker_structures.py.
"""

from __future__ import annotations

from pathlib import Path

from kvmesh.engine.protocol import ModelSpec
from kvmesh.engine.structure import StructureCompiler


def load_structures(folder: str, spec: ModelSpec) -> StructureCompiler | None:
    """The compiler for a checkpoint folder; None without a tokenizer.json. Reads a file.

    Raises:
        CheckpointError: the tokenizer cannot be used.
    """
    path = Path(folder) / "tokenizer.json"
    if not folder or not path.is_file():
        return None
    return StructureCompiler(path, spec.vocab_size, spec.eos_token_ids)
