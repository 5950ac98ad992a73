from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.model_folder import embedded_models, read_model_folder
from kvmesh.core.errors import CheckpointError
from tests.unit.cli.tiny_folder import write_folder


def test_what_a_folder_says(tmp_path: Path) -> None:
    folder = read_model_folder(write_folder(tmp_path / "m"))
    assert folder.config.max_position_embeddings == 128
    assert folder.weight_bytes == (tmp_path / "m" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        read_model_folder(folder)


def test_what_is_not_needed_may_be_missing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    read_model_folder(folder, has_text=False)
    (folder / "model.safetensors").unlink()
    assert read_model_folder(folder, has_text=False, has_weights=False).weight_bytes == 0


def test_a_tokenizer_of_another_kind_is_told_what_makes_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is not read.*save_pretrained"):
        read_model_folder(folder)


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        read_model_folder(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        read_model_folder(tmp_path / "m")


@pytest.mark.parametrize(
    "changes", [{"dtype": "int4"}, {"hidden_size": ""}, {"quantization_config": {"bits": 4}}]
)
def test_a_config_that_cannot_be_used(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*{next(iter(changes))}"):
        read_model_folder(write_folder(tmp_path / "m", **changes))


def test_a_config_that_is_broken_is_said_in_plain_words(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON: Expecting"):
        read_model_folder(folder)


def test_embedded_models(tmp_path: Path) -> None:
    write_folder(tmp_path / "models" / "b")
    write_folder(tmp_path / "models" / "a")
    (tmp_path / "models" / "empty").mkdir()
    assert [path.name for path in embedded_models(tmp_path)] == ["a", "b"]


def test_a_chat_template_that_is_no_jinja_is_told_with_its_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("a\n{% for x in messages %}b")
    with pytest.raises(CheckpointError, match=r"m: the chat template cannot be compiled: line 2"):
        read_model_folder(folder)
