"""What a model folder says about itself without loading it: is it complete, how large is it.

Tests: tests/unit/cli/test_model_folder.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.core.decoder_keys import decoder_keys
from kvmesh.core.errors import CheckpointError
from kvmesh.core.types import DTYPE_BYTES, KvLayout

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


_UNUSABLE = (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Sizes of a checkpoint.

    Attributes:
        dtype: of the weights on disk.
        weight_bytes: of all weight files.
        max_model_len: positions that the model was made for.
        num_layers: those that keep positions.
    """

    path: Path
    dtype: str
    weight_bytes: int
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, dtype: str, block_size: int) -> int:
        """Bytes of one KV block in memory."""
        shape = (block_size, self.num_layers, self.num_kv_heads, self.head_dim)
        return KvLayout("", dtype, *shape).block_bytes

    def engine_bytes(self, dtype: str, num_blocks: int, block_size: int) -> int:
        """Bytes of weights and KV of one engine; `dtype` may be auto."""
        running = self.dtype if dtype == "auto" else dtype
        weights = self.weight_bytes * DTYPE_BYTES[running] // DTYPE_BYTES[self.dtype]
        return weights + num_blocks * self.block_bytes(running, block_size)


def read_model_folder(path: Path) -> ModelFolder:
    """Reads a model folder.

    Raises:
        CheckpointError: the folder or a file is missing or cannot be read; says what to do.
    """
    check_model_folder(path)
    try:
        config = decoder_keys(json.loads((path / "config.json").read_text()))
        return _folder_of(path, config, sum(file.stat().st_size for file in _weights(path)))
    except _UNUSABLE as error:
        raise CheckpointError(f"{path}/config.json cannot be used: {error!r}") from error


def check_model_folder(path: Path, *, has_text: bool = True) -> None:
    """Checks that a folder has the files of a model.

    Args:
        has_text: whether it is to read and write text; a model that is only measured needs no
            tokenizer.

    Raises:
        CheckpointError: the folder or a file is missing; says what to do.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; {_advice(path)}")
    needed = ("config.json", "tokenizer.json") if has_text else ("config.json",)
    missing = [name for name in needed if not (path / name).is_file()]
    if not _weights(path):
        missing.append("*.safetensors")
    if missing:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}; a model folder holds a checkpoint as "
            "transformers saves it, with safetensors weights"
        )


def _weights(path: Path) -> list[Path]:
    return list(path.glob("*.safetensors"))


def _advice(path: Path) -> str:
    """What to do about a missing folder, whose last two parts may be a model's public name."""
    name = "/".join(path.absolute().parts[-2:])
    if path.absolute().parent.parent != Path.cwd() or not _HUB_NAME.fullmatch(name):
        return "name a model folder with --model"
    return (
        f"nothing is downloaded by itself: `hf download {name} --local-dir {path.name}`, then "
        f"--model {path.name}"
    )


def _folder_of(path: Path, config: Mapping[str, Any], weight_bytes: int) -> ModelFolder:
    heads = int(config["num_attention_heads"])
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype} is not one of {', '.join(DTYPE_BYTES)}")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if config.get("kv_lora_rank"):  # one latent and one key, whatever the heads
        kv_heads, head_dim = 1, (config["kv_lora_rank"] + config["qk_rope_head_dim"]) // 2
    # Linear layers keep no positions; how much room states take depends on the running sequences.
    types = config.get("layer_types") or ()
    num_linear = sum(kind == "linear_attention" for kind in types)
    return ModelFolder(
        path=path,
        dtype=dtype,
        weight_bytes=weight_bytes,
        max_model_len=int(config["max_position_embeddings"]),
        num_layers=int(config["num_hidden_layers"]) - num_linear,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def has_chat_template(path: Path) -> bool:
    """Whether the model can be asked in chats: its template is a file, or in the tokenizer's."""
    if (path / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def embedded_models(root: Path) -> list[Path]:
    """Model folders under `models/` of a checkout."""
    return sorted(path.parent for path in (root / "models").glob("*/config.json"))
