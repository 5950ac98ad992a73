"""Finds the chat template of a model folder; `template_sandbox` compiles it.

Tests: tests/unit/engine/test_chat_template.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvmesh.core.errors import CheckpointError
from kvmesh.core.text_files import UNREADABLE, why_unreadable
from kvmesh.engine.json_fields import read_json_if_any

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"


def read_chat_template(folder: Path) -> str:
    """Returns the Jinja text of the template file, else of the tokenizer's settings, else "".

    Raises:
        CheckpointError: the file that contains it cannot be read.
    """
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UNREADABLE as error:
            raise CheckpointError(f"{file}: {why_unreadable(error)}") from error
    value = read_json_if_any(folder / SETTINGS_FILE).get("chat_template")
    if isinstance(value, list):  # named templates; the one for plain chats is "default"
        entries = [entry for entry in value if isinstance(entry, Mapping)]
        value = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
    return str(value or "")
