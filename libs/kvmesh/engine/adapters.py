"""LoRA adapters in PEFT folders: checks and identity, without loading them. Torch-free.

Tests: tests/unit/engine/test_adapters.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.core.errors import CheckpointError
from kvmesh.core.named_values import named_values
from kvmesh.engine.json_fields import Fields, read_json
from kvmesh.engine.weight_files import identity_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter.

    Attributes:
        name: model name by which clients use it.
        rank: rank of its matrices.
    """

    name: str
    folder: Path
    rank: int


def read_adapters(text: str) -> tuple[Adapter, ...]:
    """Reads the adapters named in `engine.lora`, sorted by name.

    Raises:
        ConfigError: the text is malformed, or repeats a name.
        CheckpointError: a folder holds no adapter.
    """
    folders = named_values(text, "engine.lora", "NAME=FOLDER")
    return tuple(_read(name, Path(folder)) for name, folder in sorted(folders.items()))


def _read(name: str, folder: Path) -> Adapter:
    for needed in (CONFIG, WEIGHTS):
        if not (folder / needed).is_file():
            raise CheckpointError(f"the adapter {name}: {folder} has no {needed}")
    config = read_json(folder / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"the adapter {name}: peft_type is {kind!r}, and LORA is served")
    rank = Fields(config, str(folder / CONFIG)).number("r", int)
    return Adapter(name, folder.resolve(), rank)


def adapters_identity(adapters: Sequence[Adapter]) -> str:
    """Returns the adapters' part of a checkpoint's identity, which differs between adapter sets."""
    return " ".join(f"{each.name}={_identity(each)}" for each in adapters)


def _identity(adapter: Adapter) -> str:
    config = read_json(adapter.folder / CONFIG)
    return identity_of(repr(config), (adapter.folder / WEIGHTS,))
