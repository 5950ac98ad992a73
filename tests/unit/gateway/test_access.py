from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvmesh.core.errors import AuthenticationError, ConfigError
from kvmesh.core.types import RefusalReason
from services.gateway.access import Admission, KeyRing, bearer_key, load_keys
from services.gateway.config import AccessConfig
from services.gateway.errors import StageRefusedError


@pytest.mark.parametrize(
    ("header", "key"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", ""), ("", ""), ("abc", "")],
)
def test_bearer_key(header: str, key: str) -> None:
    assert bearer_key(header) == key


def test_keys_are_checked() -> None:
    ring = KeyRing(["one", "two"])
    first, second = ring.check("Bearer one"), ring.check("Bearer two")
    assert first != second
    assert "one" not in first
    for header in ("Bearer three", "", "Bearer "):
        with pytest.raises(AuthenticationError):
            ring.check(header)


def test_without_keys_everyone_may_call_under_their_own_name() -> None:
    ring = KeyRing()
    assert ring.check("") == ""
    assert ring.check("Bearer a") != ring.check("Bearer b")


def test_keys_from_both_sources(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team\none\n\n two \n")
    ring = load_keys(AccessConfig(api_keys=" three ,", api_keys_file=str(file)))
    for key in ("one", "two", "three"):
        assert ring.check(f"Bearer {key}")


def test_key_file_must_be_there_and_hold_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_keys(AccessConfig(api_keys_file=str(tmp_path / "none")))
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_keys(AccessConfig(api_keys_file=str(empty)))


def test_quota_is_per_caller_and_given_back() -> None:
    admission = Admission(max_per_key=1)
    with admission.admit("a"):
        with admission.admit("b"):
            assert admission.num_open == 2
        with pytest.raises(StageRefusedError) as caught, admission.admit("a"):
            pass
        assert caught.value.refusal.reason is RefusalReason.QUOTA
        assert caught.value.status == 429
    assert admission.num_open == 0
    with admission.admit("a"):
        assert admission.num_open == 1


async def test_drain_waits_for_what_runs() -> None:
    admission = Admission(max_per_key=0)
    with admission.admit("a"):
        drain = asyncio.create_task(admission.drain())
        await asyncio.sleep(0)
        assert not drain.done()
        with pytest.raises(StageRefusedError) as caught, admission.admit("a"):
            pass
        assert caught.value.label == "gateway-draining"
    await drain
