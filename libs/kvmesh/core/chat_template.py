"""The chat template of a model folder: where it stands. `template_sandbox` compiles it.

Tests: tests/unit/core/test_chat_template.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmesh.core.errors import CheckpointError
from kvmesh.core.text_files import UNREADABLE, why_unreadable

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON file of a model folder; empty if there is none.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: {why_unreadable(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return content


def read_chat_template(folder: Path) -> str:
    """Jinja text: of its own file, else of the tokenizer's settings; empty if the model has none.

    Raises:
        CheckpointError: the file that it stands in cannot be read.
    """
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UNREADABLE as error:
            raise CheckpointError(f"{file}: {why_unreadable(error)}") from error
    value = read_settings(folder / SETTINGS_FILE).get("chat_template")
    if isinstance(value, list):  # named templates; the one for plain chats is "default"
        entries = [entry for entry in value if isinstance(entry, Mapping)]
        value = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
    return str(value or "")
