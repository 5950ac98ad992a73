from __future__ import annotations

import pytest
import torch

from kvmesh.core.errors import ConfigError
from kvmesh.engine.checkpoint import parse_model_config
from kvmesh.engine.device_check import require_device, require_room_for_latents
from kvmesh.kernels.device_limits import shared_memory_bytes
from tests.unit.engine.tiny_checkpoint import CONFIG

LATENTS = CONFIG | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says on a machine with one H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Some GPU")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0"])
def test_what_is_there_is_taken(one_gpu: None, device: str) -> None:
    require_device(device)


def test_the_cpu_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_device("cpu")
    with pytest.raises(ConfigError, match="there is no CUDA device"):
        require_device("cuda")


def test_a_device_that_is_not_there(one_gpu: None) -> None:
    with pytest.raises(ConfigError, match="'cuda:1' was asked for and there are 1"):
        require_device("cuda:1")


@pytest.mark.parametrize("device", ["mps", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", ""])
def test_what_is_no_device_is_said_to_be_none(one_gpu: None, device: str) -> None:
    with pytest.raises(ConfigError, match="cpu, cuda or cuda:N"):
        require_device(device)


def test_amd_is_refused_by_name(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="AMD"):
        require_device("cuda")


def test_old_devices_are_refused_with_what_they_lack(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    with pytest.raises(ConfigError, match=r"compute capability 7\.5; the kernels need 8\.0"):
        require_device("cuda")


@pytest.mark.parametrize(
    ("capability", "kib"), [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99)]
)
def test_shared_memory(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kib: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    shared_memory_bytes.cache_clear()
    assert shared_memory_bytes("cuda") == kib << 10
    config = parse_model_config(LATENTS, {}, origin="test")
    for dtype, device in (("bfloat16", "cuda"), ("float32", "cpu")):
        require_room_for_latents(config, dtype, device)
    if kib > 145:
        require_room_for_latents(config, "float32", "cuda")
    else:
        with pytest.raises(ConfigError, match=r"need 145 KiB .* 99 are there; use bfloat16"):
            require_room_for_latents(config, "float32", "cuda")
    shared_memory_bytes.cache_clear()
