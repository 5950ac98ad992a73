"""Loads the compiler of structures, which needs the tokenizer of a worker's model.

Tests: tests/unit/runtime/test_worker_structures.py.
"""

from __future__ import annotations

from pathlib import Path

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.protocol import ModelSpec
from kvmesh.engine.structure import StructureCompiler
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)


def load_structures(folder: Path | None, spec: ModelSpec) -> StructureCompiler | None:
    """Makes the compiler for a checkpoint folder; None without one, or without a usable tokenizer.

    Reads a file. A worker without a compiler still serves, and refuses structures by name.
    """
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.is_file():
        return None
    try:
        return StructureCompiler(path, spec.vocab_size, spec.eos_token_ids)
    except CheckpointError as error:
        log.warning("no_structures", error=str(error))
        return None
