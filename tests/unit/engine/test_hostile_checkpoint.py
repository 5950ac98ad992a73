"""Weight files that lie about themselves: an error that names them, and nothing read elsewhere."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.weight_files import find_weight_files
from kvmesh.engine.weights import WeightFiles

PAYLOAD = bytes(24)


def _tensor(shape: list[int], first: int, last: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def _file(header: Any, *, size: int | None = None, payload: bytes = PAYLOAD) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + payload


GOOD = {"a": _tensor([2, 3], 0, 24)}

LIES = {
    "offsets behind the end": _file({"a": _tensor([2, 3], 8, 32)}),
    "offsets far behind the end": _file({"a": _tensor([2, 3], 2**62, 2**62 + 24)}),
    "offsets backwards": _file({"a": _tensor([2, 3], 24, 0)}),
    "negative offsets": _file({"a": _tensor([2, 3], -24, 0)}),
    "overlapping": _file({"a": _tensor([4], 0, 16), "b": _tensor([4], 8, 24)}),
    "a hole": _file({"a": _tensor([2], 0, 8), "b": _tensor([2], 16, 24)}),
    "a product beyond 64 bits": _file({"a": _tensor([2**33, 2**33], 0, 24)}),
    "a product that wraps to the size": _file({"a": _tensor([2**61, 8, 3], 0, 24)}),
    "more bytes than the shape": _file({"a": _tensor([2], 0, 24)}),
    "an unknown dtype": _file({"a": _tensor([2, 3], 0, 24, "F33")}),
    "a header of 2^63 bytes": _file(GOOD, size=2**63),
    "a header longer than the file": _file(GOOD, size=10_000),
    "a header of 200 MB": _file(GOOD, size=200_000_000),
    "no JSON": _file(b"{" * 40),
    "nested": _file(b'{"a":' * 20_000),
    "a list": _file([GOOD]),
    "bytes behind the last tensor": _file(GOOD, payload=PAYLOAD + b"more"),
    "nothing": b"",
    "half a length": b"\1\0\0",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(LIES[lie])
    with (
        pytest.raises(CheckpointError, match="not a readable safetensors file"),
        WeightFiles(tmp_path),
    ):
        pass


def test_a_name_that_is_there_twice_is_one_tensor_of_the_shape_asked_for(tmp_path: Path) -> None:
    one, two = (json.dumps(_tensor(shape, 0, 24)) for shape in ([2, 3], [3, 2]))
    (tmp_path / "model.safetensors").write_bytes(_file(f'{{"a": {one}, "a": {two}}}'.encode()))
    with WeightFiles(tmp_path) as files:
        assert files.read("a", (3, 2)).shape == (3, 2)
        with pytest.raises(CheckpointError, match=r"config\.json says"):
            files.read("a", (2, 3))


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "sub/x", "..", "", "a\0b", 7, None, ["x"], {}]
)
def test_an_index_leads_nowhere_else(shard: object, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"a": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="index"):
        find_weight_files(folder)


def test_a_shard_may_be_a_link_as_in_caches_of_models(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blob")
    (folder / "x.safetensors").symlink_to(tmp_path / "blob")
    index = {"weight_map": {"a": "x.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with WeightFiles(folder) as files:
        assert files.read("a", (2,)).tolist() == [1, 1]


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "\0", '{"model_type": ["llama"]}'])
def test_a_config_that_lies_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError):
        load_model_config(tmp_path)
