from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.weight_files import find_weight_files
from kvmesh.engine.weights import WeightFiles, fingerprint
from tests.unit.engine.tiny_checkpoint import tensors, write_checkpoint


def write_shards(folder: Path) -> None:
    first, second = {"a": torch.ones(2, 3)}, {"b": torch.full((1, 3), 2.0)}
    save_file(first, folder / "model-1.safetensors")
    save_file(second, folder / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_of_shards_are_stacked(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with WeightFiles(tmp_path) as files:
        stacked = files.read_rows([("b", 1), ("a", 2)], 3, torch.float16, "cpu")
    assert stacked.dtype == torch.float16
    assert stacked.tolist() == [[2.0] * 3, [1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.norm.weight", "model.language_model.norm.weight"),
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("h.0.ln_1.weight", "transformer.h.0.ln_1.weight"),
        ("wte.weight", "transformer.wte.weight"),
        ("decoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
    ],
)
def test_older_names_of_a_decoders_tensors(tmp_path: Path, stored: str, name: str) -> None:
    save_file({stored: torch.ones(2)}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        assert files.has(name)
        assert files.read(name, (2,)).tolist() == [1.0, 1.0]


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing weight files: model-2\.safetensors"):
        find_weight_files(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        find_weight_files(tmp_path)


def test_malformed_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(CheckpointError, match="not a valid weight index"):
        find_weight_files(tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with (
        pytest.raises(CheckpointError, match="not a readable safetensors file"),
        WeightFiles(tmp_path),
    ):
        pass


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with WeightFiles(tmp_path) as files:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            files.read("lm_head.weight", (64, 32))
        with pytest.raises(CheckpointError, match=r"shape \(32,\), config\.json says \(33,\)"):
            files.read("model.norm.weight", (33,))


def test_fingerprint_follows_the_weights_and_not_the_place(tmp_path: Path) -> None:
    here = write_checkpoint(tmp_path / "here")
    there = Path(shutil.copytree(here, tmp_path / "there"))
    tuned = write_checkpoint(tmp_path / "tuned", seed=1)
    config = load_model_config(here)

    def identity(folder: Path, dtype: str = "float32") -> str:
        return fingerprint(config, find_weight_files(folder), dtype)

    assert identity(here) == identity(there)
    assert identity(tuned) != identity(here), "same shapes, other values"
    assert identity(here, "bfloat16") != identity(here)
    other_config = load_model_config(write_checkpoint(tmp_path / "rope", rope_theta=5e5))
    assert fingerprint(other_config, find_weight_files(here), "float32") != identity(here)
    assert len(tensors()) == 20
