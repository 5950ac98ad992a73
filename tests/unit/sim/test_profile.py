from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.sim.fields import Fields
from kvmesh.sim.profile import gbps
from kvmesh.sim.profile_file import load_profile, parse_profile, shipped_profiles

DATA: dict[str, Any] = json.loads(
    resources.files("kvmesh.sim.profiles").joinpath("prfaas.json").read_text()
)


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_are_whole(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    for device in profile.devices.values():
        times = [device.prefill_s(length) for length in (1, 512, 8192, 131_072)]
        assert times == sorted(times)
        assert times[0] > 0
        assert device.decode.step_s(1, 1000) <= device.decode.step_s(8, 9000)
    assert profile.serving.decode_rate > 0


def test_there_are_profiles() -> None:
    assert {"prfaas", "flowkv", "tokenlake"} <= set(shipped_profiles())


def test_a_profile_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**DATA, "name": "mine"}))
    assert load_profile(str(path)).name == "mine"


def test_units() -> None:
    assert gbps(8) == 1e9
    assert load_profile("prfaas").links.between_bytes_per_s == 12.5e9


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("devices", "h20", "num_blocks"), 0, "num_blocks"),
        (("devices", "h20", "num_blocks"), "x", "wrong type"),
        (("extra",), 1, "unknown extra"),
        (("devices", "h20", "num_blocks"), 1.5, "devices.h20.num_blocks"),
        (("devices", "h20", "decode_s", "constant"), True, "constant"),
        (("kv_bytes", "points"), [[2, 1], [1, 1]], "kv_bytes"),
        (("kv_bytes", "points"), [[2]], "kv_bytes"),
        (("plan", "remote"), "h9", "no device 'h9'"),
        (("plan", "lengths", "min"), 10**6, "plan.lengths"),
    ],
)
def test_a_wrong_entry_is_named(path: tuple[str, ...], value: Any, message: str) -> None:
    data = copy.deepcopy(DATA)
    inside = data
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        parse_profile(Fields(data, "p"))


def test_a_missing_entry_is_named() -> None:
    data = {key: value for key, value in DATA.items() if key != "links"}
    with pytest.raises(ConfigError, match="links is missing"):
        parse_profile(Fields(data, "p"))


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xfe\xfd"])
def test_what_is_no_profile(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        load_profile(str(path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="flowkv, prfaas, tokenlake"):
        load_profile("nothing")
