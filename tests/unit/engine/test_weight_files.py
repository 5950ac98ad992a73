from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.weight_files import check_weight_files
from tests.unit.engine.tiny_checkpoint import tensors

SHARDS = ("model-1.safetensors", "model-2.safetensors")


def write_shards(folder: Path) -> dict[str, str]:
    owners: dict[str, str] = {}
    for name, part in zip(SHARDS, _halves(), strict=True):
        save_file(part, folder / name)
        owners |= dict.fromkeys(part, name)
    write_index(folder, owners)
    return owners


def _halves() -> list[dict[str, torch.Tensor]]:
    items = list(tensors().items())
    return [dict(items[:5]), dict(items[5:])]


def write_index(folder: Path, owners: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))


def test_whole_files_are_counted(tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert check_weight_files(tmp_path) == sum((tmp_path / name).stat().st_size for name in SHARDS)


@pytest.mark.parametrize("missing", [1, 1000, 4, 12_000])
def test_a_truncated_file_is_said_to_be_one(tmp_path: Path, missing: int) -> None:
    write_shards(tmp_path)
    file = tmp_path / SHARDS[1]
    whole = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(whole - missing)
    found = rf"model-2\.safetensors.*truncated, {whole - missing} of {whole} bytes.*download"
    with pytest.raises(CheckpointError, match=found):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("left", [0, 3, 8, 100])
def test_a_file_whose_header_is_cut_is_refused(tmp_path: Path, left: int) -> None:
    write_shards(tmp_path)
    with (tmp_path / SHARDS[0]).open("r+b") as opened:
        opened.truncate(left)
    with pytest.raises(CheckpointError, match=rf"model-1.*truncated, {left} "):
        check_weight_files(tmp_path)


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=r"missing weight files: model-2"):
        check_weight_files(tmp_path)


def test_shards_of_different_copies(tmp_path: Path) -> None:
    owners = write_shards(tmp_path)
    write_index(tmp_path, owners | {"model.layers.7.more": SHARDS[0]})
    with pytest.raises(CheckpointError, match=r"model-1.*lacks model\.layers\.7\.more"):
        check_weight_files(tmp_path)


def test_quantized_weights_are_refused_by_their_dtype(tmp_path: Path) -> None:
    weights = {"model.norm.weight": torch.ones(4).to(torch.float8_e4m3fn)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the dtype F8_E4M3"):
        check_weight_files(tmp_path)


def test_masks_beside_weights_are_no_matter(tmp_path: Path) -> None:
    save_file({"h.0.attn.bias": torch.ones(4, dtype=torch.bool)}, tmp_path / "model.safetensors")
    assert check_weight_files(tmp_path)


def test_weights_of_another_format_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not"):
        check_weight_files(tmp_path)


def test_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n"
    (tmp_path / "model.safetensors").write_text(text)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        check_weight_files(tmp_path)


def test_torch_is_not_needed() -> None:
    assert not {"torch", "numpy"} & _modules_of("kvmesh.engine.weight_files")


def _modules_of(module: str) -> set[str]:
    import subprocess

    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())
