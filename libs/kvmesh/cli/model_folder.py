"""Checks a model folder without loading it: whether it is complete, and how large it is.

Tests: tests/unit/cli/test_model_folder.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.chat_template import read_chat_template
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.weight_files import check_weight_files

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checkpoint whose files are complete.

    Attributes:
        config: model configuration as the engine reads it.
        weight_bytes: size of all weight files; 0 if they were not checked.
    """

    path: Path
    config: ModelConfig
    weight_bytes: int


def read_model_folder(
    path: Path, *, has_text: bool = True, has_weights: bool = True
) -> ModelFolder:
    """Reads a model folder; of its weights only the headers.

    Args:
        has_text: whether a tokenizer is needed; a model that is only measured needs none.
        has_weights: whether weights are needed; the fake engine needs none.

    Raises:
        CheckpointError: the folder or a file is missing, damaged or not supported; the message says
            what to do.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; name a model folder")
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} lacks config.json; a model folder holds a checkpoint as transformers saves it"
        )
    config = load_model_config(path)
    weight_bytes = check_weight_files(path) if has_weights else 0
    if has_text:
        _check_text(path)
    return ModelFolder(path, config, weight_bytes)


def _check_text(path: Path) -> None:
    file = path / "tokenizer.json"
    if not file.is_file():
        others = [name for name in _OTHER_TOKENIZERS if (path / name).is_file()]
        remedy = (
            f"{others[0]} is not read: transformers makes the file of it, "
            f"`AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')`"
            if others
            else "copy it from where the weights are from"
        )
        raise CheckpointError(f"{path} lacks tokenizer.json; {remedy}")
    # Imported here: only installations that serve text have these packages.
    import tokenizers  # noqa: PLC0415

    from kvmesh.engine.template_sandbox import compile_chat_template  # noqa: PLC0415

    try:
        tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise CheckpointError(
            f"{file} is no tokenizer: {error}; copy or download it again"
        ) from error
    try:
        compile_chat_template(read_chat_template(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; copy or download it again") from error


def embedded_models(root: Path) -> list[Path]:
    """Returns the model folders under `models/` of a checkout."""
    return sorted(path.parent for path in (root / "models").glob("*/config.json"))
