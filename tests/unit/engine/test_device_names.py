from __future__ import annotations

import importlib.metadata

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.engine.device_names import (
    DeviceTurns,
    device_index,
    num_devices,
    require_named_device,
)


@pytest.fixture
def torch_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.13.0+cu130")


def two() -> int:
    return 2


@pytest.mark.parametrize(("device", "index"), [("cpu", None), ("cuda", 0), ("cuda:12", 12)])
def test_names(device: str, index: int | None) -> None:
    assert device_index(device) == index


def test_what_is_there_is_taken(torch_of_devices: None) -> None:
    for device in ("cpu", "cuda", "cuda:1"):
        require_named_device(device, count_devices=two)


def test_a_number_beyond_the_last(torch_of_devices: None) -> None:
    with pytest.raises(ConfigError, match="'cuda:2' was asked for and there are 2 CUDA devices"):
        require_named_device("cuda:2", count_devices=two)


def test_the_cpu_asks_for_nothing(torch_of_devices: None) -> None:
    def none() -> int:
        return 0

    require_named_device("cpu", count_devices=none)
    with pytest.raises(ConfigError, match="there is no CUDA device; use cpu"):
        require_named_device("cuda", count_devices=none)


@pytest.mark.parametrize("library", ["no-such-library.so", "libc.so.6"])
def test_without_a_driver_there_are_none(library: str) -> None:
    assert num_devices(library) == 0


def test_a_torch_that_knows_of_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "2.13.0+cpu")
    with pytest.raises(ConfigError, match=r"2\.13\.0\+cpu, is the build for CPUs"):
        require_named_device("cuda", count_devices=two)


@pytest.mark.parametrize(
    ("device", "num_ranks", "count", "taken"),
    [
        ("cpu", 1, 0, ["cpu", "cpu"]),
        ("cuda:1", 1, 2, ["cuda:1", "cuda:1"]),
        ("cuda", 1, 1, ["cuda:0", "cuda:0"]),
        ("cuda", 1, 3, ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]),
        ("cuda", 2, 5, ["cuda:0", "cuda:2", "cuda:0"]),
    ],
)
def test_engines_of_a_host_take_devices_in_turn(
    device: str, num_ranks: int, count: int, taken: list[str]
) -> None:
    turns = DeviceTurns(device, lambda: count)
    assert [turns.take(num_ranks) for _ in taken] == taken
