"""A model folder that lacks nothing: a tiny checkpoint and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from tests.unit.engine.tiny_checkpoint import write_checkpoint


def write_folder(folder: Path, **config: Any) -> Path:
    """Writes one and returns it; changes of its config.json do not change its weights."""
    write_checkpoint(folder, **config)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer without words."""
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
