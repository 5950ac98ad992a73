"""LoRA adapters in PEFT folders: checks and identity, without loading them. Torch-free.

Tests: tests/unit/engine/test_adapters.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.core.adapters import adapter_id
from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.core.named_values import named_values
from kvmesh.engine.json_fields import Fields, read_json
from kvmesh.engine.weight_files import open_weights

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_FROM_HIDDEN = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_TO_HIDDEN = frozenset({"o_proj", "down_proj"})

_DIGEST_BYTES = 8
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter.

    Attributes:
        name: model name by which clients use it.
        rank: rank of its matrices.
        content: digest of its config and weights.
    """

    name: str
    folder: Path
    rank: int
    content: str

    @property
    def id(self) -> str:
        """Its id in the mesh; other weights under the same name have another id."""
        return adapter_id(self.name, self.content)


def read_adapters(text: str) -> tuple[Adapter, ...]:
    """Reads the adapters named in `engine.lora`, sorted by name.

    Raises:
        ConfigError: the text is malformed, or repeats a name.
        CheckpointError: a folder holds no adapter.
    """
    folders = named_values(text, "engine.lora", "NAME=FOLDER")
    return tuple(read_adapter(name, Path(folder)) for name, folder in sorted(folders.items()))


def read_adapter(name: str, folder: Path) -> Adapter:
    """Reads what an adapter is. All of its weights are read once, for their digest.

    Raises:
        CheckpointError: the folder holds no adapter.
    """
    for needed in (CONFIG, WEIGHTS):
        if not (folder / needed).is_file():
            raise CheckpointError(f"the adapter {name}: {folder} has no {needed}")
    config = read_json(folder / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"the adapter {name}: peft_type is {kind!r}, and LORA is served")
    rank = Fields(config, str(folder / CONFIG)).number("r", int)
    digest = hashlib.blake2b(repr(config).encode(), digest_size=_DIGEST_BYTES)
    try:
        with (folder / WEIGHTS).open("rb") as file:
            # All bytes, since two adapters of one training may differ in few of them.
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"the adapter {name}: {error}") from error
    return Adapter(name, folder.resolve(), rank, digest.hexdigest())


def check_rank(adapter: Adapter, longest: int) -> None:
    """Checks that an adapter's rank fits the places of a running engine.

    Raises:
        ConfigError: it does not.
    """
    if adapter.rank > longest:
        raise ConfigError(
            f"the adapter {adapter.name} has rank {adapter.rank}, and this worker takes up to "
            f"{longest}: start workers with a larger engine.max-lora-rank"
        )


def check_width(adapter: Adapter, hidden_size: int) -> None:
    """Checks that an adapter was trained on a model as wide as this one, by the header alone.

    vLLM copies a narrower adapter into a part of its place and computes with the rest of it.

    Raises:
        CheckpointError: the file is damaged, or the adapter is of another model.
    """
    with open_weights(adapter.folder / WEIGHTS, "numpy") as file:
        for name in file.keys():  # noqa: SIM118
            width = _hidden_width(name, file)
            if width not in (None, hidden_size):
                raise CheckpointError(
                    f"the adapter {adapter.name} is of another model: {name} is for a hidden size "
                    f"of {width}, and this model's is {hidden_size}"
                )


def _hidden_width(name: str, file: Any) -> int | None:
    """The hidden size that a tensor was made for; None if it does not show."""
    parts = name.split(".")
    shape = file.get_slice(name).get_shape()
    if len(parts) < 3 or len(shape) != 2:
        return None
    module, matrix = parts[-3], parts[-2]
    if matrix == "lora_A" and module in _FROM_HIDDEN:
        return int(shape[1])
    if matrix == "lora_B" and module in _TO_HIDDEN:
        return int(shape[0])
    return None
