from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.model_folder import embedded_models, has_chat_template, read_model_folder
from kvmesh.core.errors import CheckpointError

CONFIG = {
    "dtype": "bfloat16",
    "hidden_size": 64,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
}


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def test_sizes(tmp_path: Path) -> None:
    folder = read_model_folder(_write(tmp_path / "m", CONFIG))
    assert (folder.head_dim, folder.num_kv_heads, folder.max_model_len) == (16, 2, 128)
    block = 3 * 2 * 8 * 2 * 16 * 2  # layers, K and V, positions, heads, head_dim, bytes
    assert folder.block_bytes("bfloat16", 8) == block
    assert folder.engine_bytes("auto", 10, 8) == 1000 + 10 * block
    assert folder.engine_bytes("float32", 10, 8) == 2000 + 20 * block


def test_latents_and_linear_layers_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    latent = {**CONFIG, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    assert read_model_folder(_write(tmp_path / "a", latent)).block_bytes("bfloat16", 8) == (
        3 * 8 * 40 * 2
    )
    types = ["linear_attention", "full_attention", "linear_attention"]
    hybrid = {**CONFIG, "layer_types": types}
    assert read_model_folder(_write(tmp_path / "b", hybrid)).num_layers == 1


def test_keys_of_a_model_that_sees_pictures_lie_deeper(tmp_path: Path) -> None:
    flat = read_model_folder(_write(tmp_path / "flat", CONFIG))
    whole = {"model_type": "mistral3", "dtype": "bfloat16", "text_config": CONFIG}
    found = read_model_folder(_write(tmp_path / "seeing", whole))
    assert found.block_bytes("bfloat16", 8) == flat.block_bytes("bfloat16", 8)


def test_older_configs(tmp_path: Path) -> None:
    older = {**CONFIG, "torch_dtype": "float16"}
    del older["dtype"], older["num_key_value_heads"]
    folder = read_model_folder(_write(tmp_path / "m", older))
    assert (folder.dtype, folder.num_kv_heads) == ("float16", 4)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    folder = _write(tmp_path / "m", CONFIG)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace("model", "")):
        read_model_folder(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--model"):
        read_model_folder(tmp_path / "m")


@pytest.mark.parametrize("config", [{}, {**CONFIG, "dtype": "int4"}, {**CONFIG, "hidden_size": ""}])
def test_a_config_that_cannot_be_used(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_folder(_write(tmp_path / "m", config))


def test_embedded_models(tmp_path: Path) -> None:
    _write(tmp_path / "models" / "b", CONFIG)
    _write(tmp_path / "models" / "a", CONFIG)
    (tmp_path / "models" / "empty").mkdir()
    assert [path.name for path in embedded_models(tmp_path)] == ["a", "b"]


def test_a_public_name_is_told_how_to_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="`hf download Qwen/Qwen3-0"):
        read_model_folder(Path("Qwen/Qwen3-0.6B").resolve())
    with pytest.raises(CheckpointError, match="is no folder; name a model folder"):
        read_model_folder(Path("/nowhere/at/all"))


@pytest.mark.parametrize(
    ("name", "text", "has"),
    [
        ("chat_template.jinja", "{{ messages }}", True),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"model_max_length": 5}', False),
        ("tokenizer_config.json", "{", False),
    ],
)
def test_a_chat_template_may_be_in_either_file(
    tmp_path: Path, name: str, text: str, has: bool
) -> None:
    (tmp_path / name).write_text(text)
    assert has_chat_template(tmp_path) is has
