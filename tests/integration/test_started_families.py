"""`kvmesh up` takes every family that is supported, with configs as transformers saves them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma4UnifiedConfig

from kvmesh.cli.preflight import Room, machine_problems, model_problems
from kvmesh.cli.stack import StackOptions, StackPaths
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.families import FAMILIES
from tests.integration.family_configs import CONFIGS
from tests.integration.test_seeing_checkpoints import CASES
from tests.unit.cli.tiny_folder import write_tokenizer


def config_of(kind: str) -> Any:
    """A config of transformers of this `model_type`."""
    for config in CONFIGS.values():
        if config.model_type == kind:
            return config
    if kind == "gemma4_unified":
        return Gemma4UnifiedConfig(text_config=CONFIGS["gemma4-unified"].to_dict())
    for case in CASES.values():
        if case.config_class.model_type == kind:
            name, changes = case.decoder
            return case.config_class(text_config=CONFIGS[name].to_dict() | changes, **case.whole)
    raise AssertionError(f"there is no config of {kind}")


@pytest.fixture
def options(tmp_path: Path) -> StackOptions:
    return StackOptions(
        model=tmp_path,
        model_name="m",
        num_prefill=2,
        num_decode=2,
        host="127.0.0.1",
        http_port=0,
        engine="torch",
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
