from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.engine.adapters import (
    CONFIG,
    WEIGHTS,
    check_rank,
    check_width,
    read_adapter,
    read_adapters,
)


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
        return read_adapter(name, folder).id

    one = identity("sql", write(tmp_path / "a"))
    assert one == identity("sql", write(tmp_path / "b"))
    assert one != identity("py", tmp_path / "a")
    assert one != identity("sql", write(tmp_path / "c", weights=b"others."))
    assert one != identity("sql", write(tmp_path / "d", lora_alpha=3))


def test_one_byte_of_large_weights_is_another_adapter(tmp_path: Path) -> None:
    weights = bytearray(3 << 20)
    one = read_adapter("sql", write(tmp_path / "a", weights=bytes(weights))).id
    weights[1234567] = 1
    assert read_adapter("sql", write(tmp_path / "a", weights=bytes(weights))).id != one


def test_a_rank_that_does_not_fit_a_place_says_what_to_change(tmp_path: Path) -> None:
    adapter = read_adapter("sql", write(tmp_path / "a", r=32))
    check_rank(adapter, 32)
    with pytest.raises(ConfigError, match=r"rank 32.*takes up to 16.*engine\.max-lora-rank"):
        check_rank(adapter, 16)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [("q_proj.lora_A", (4, 96)), ("down_proj.lora_B", (96, 4))],
)
def test_an_adapter_of_a_model_of_another_width_is_refused(
    tensor: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    folder = write(tmp_path / "a")
    save_file({f"layers.0.{tensor}.weight": numpy.zeros(shape)}, folder / WEIGHTS)
    adapter = read_adapter("sql", folder)
    check_width(adapter, 96)
    with pytest.raises(CheckpointError, match=r"hidden size of 96, and this model's is 128"):
        check_width(adapter, 128)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        check_width(read_adapter("sql", write(tmp_path / "a")), 96)
