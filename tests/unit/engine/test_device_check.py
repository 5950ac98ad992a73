from __future__ import annotations

import pytest
import torch

from kvmesh.core.errors import ConfigError
from kvmesh.engine.device_check import require_device


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
