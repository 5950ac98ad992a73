"""`kvmesh up` takes every family that is supported, with configs as transformers saves them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvmesh.cli.preflight import Room, machine_problems, model_problems
from kvmesh.cli.stack import StackOptions, StackPaths
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.families import FAMILIES
from tests.integration.kinds import config_of
from tests.unit.cli.tiny_folder import write_tokenizer


@pytest.fixture
def options(tmp_path: Path) -> StackOptions:
    return StackOptions(
        model=tmp_path,
        model_name="m",
        num_prefill=2,
        num_decode=2,
        host="127.0.0.1",
        http_port=0,
        engine="kvmesh",
        dtype="auto",
        device="cpu",
        num_blocks=64,
        block_size=16,
        max_model_len=0,
        num_threads=1,
        redis_url="",
        drain_s=5.0,
    )


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_family_may_be_started(kind: str, options: StackOptions, tmp_path: Path) -> None:
    config_of(kind).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    paths = StackPaths(
        Path(__file__).parents[2], tmp_path / "state", Path(sys.executable), Path("/bin/redis")
    )
    room = Room(memory=64 << 30, disk=1 << 30)
    assert machine_problems(options, paths, room) == []
    assert model_problems(options, room) == []
    assert load_model_config(tmp_path).family == kind
