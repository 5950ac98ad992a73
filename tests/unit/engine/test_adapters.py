from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.engine.adapters import CONFIG, WEIGHTS, adapters_identity, read_adapters


def write(folder: Path, *, weights: bytes = b"weights", **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 8, **config}))
    (folder / WEIGHTS).write_bytes(weights)
    return folder


def test_adapters_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b", r=16)
    found = read_adapters(f"sql={second}, py = {first},")
    assert [(each.name, each.folder, each.rank) for each in found] == [
        ("py", first, 8),
        ("sql", second, 16),
    ]
    assert read_adapters("") == ()


@pytest.mark.parametrize("text", ["sql", "=folder", "sql=", "a={0},a={0}"])
def test_what_is_malformed_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"NAME=FOLDER"):
        read_adapters(text.format(write(tmp_path / "a")))


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"sql: .*none has no adapter_config"):
        read_adapters(f"sql={tmp_path / 'none'}")
    write(tmp_path / "a", peft_type="PROMPT_TUNING")
    with pytest.raises(CheckpointError, match="LORA is served"):
        read_adapters(f"sql={tmp_path / 'a'}")
    write(tmp_path / "b", r=None)
    with pytest.raises(CheckpointError, match="r must be a number"):
        read_adapters(f"sql={tmp_path / 'b'}")


def test_identity_follows_names_and_weights_and_not_the_place(tmp_path: Path) -> None:
    def identity(name: str, folder: Path) -> str:
        return adapters_identity(read_adapters(f"{name}={folder}"))

    one = identity("sql", write(tmp_path / "a"))
    assert one == identity("sql", write(tmp_path / "b"))
    assert one != identity("py", tmp_path / "a")
    assert one != identity("sql", write(tmp_path / "c", weights=b"others."))
    assert one != identity("sql", write(tmp_path / "d", lora_alpha=3))
