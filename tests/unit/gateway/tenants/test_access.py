from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.core.errors import AuthenticationError, ConfigError
from kvmesh.metadata.tenant_store import FileTenantStore
from kvmesh.metadata.tenants import Directory, KeyRecord, digest_of, directory_to_json
from kvmesh.policy.quota import Tenant, TenantLimits
from services.gateway.config import AccessConfig
from services.gateway.errors import StageRefusedError
from services.gateway.tenants.access import (
    DirectoryWatch,
    KeyRing,
    bearer_key,
    directory_store,
    load_keys,
)


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
    assert "one" not in first.name
    for header in ("Bearer three", "", "Bearer "):
        with pytest.raises(AuthenticationError):
            ring.check(header)


def test_without_keys_everyone_may_call_under_their_own_name() -> None:
    ring = KeyRing()
    assert ring.check("").name == ""
    assert ring.check("Bearer a") != ring.check("Bearer b")
    assert ring.check("Bearer a").salted("x") == "0::x"  # nobody has checked who that is


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
    empty.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_keys(AccessConfig(api_keys_file=str(empty)))


DIRECTORY = (
    Directory()
    .with_tenant("acme", TenantLimits(requests_per_min=5))
    .with_key(KeyRecord(digest_of("kvm-one"), "acme"))
)


def test_a_key_of_the_directory_stands_for_its_tenant() -> None:
    ring = KeyRing(["plain"], has_directory=True)
    ring.use(DIRECTORY)
    tenant = ring.check("Bearer kvm-one")
    assert (tenant.name, tenant.limits.requests_per_min, tenant.is_known) == ("acme", 5, True)
    assert not ring.check("Bearer plain").is_known
    for header in ("Bearer kvm-two", "Bearer acme", f"Bearer {digest_of('kvm-one')}", ""):
        with pytest.raises(AuthenticationError):
            ring.check(header)


def test_until_the_directory_is_read_nobody_is_let_in() -> None:
    ring = KeyRing(["plain"], has_directory=True)
    with pytest.raises(StageRefusedError, match="could not be read"):
        ring.check("Bearer kvm-one")
    assert ring.check("Bearer plain").name
    ring.use(Directory())
    with pytest.raises(AuthenticationError):
        ring.check("Bearer kvm-one")


async def test_a_changed_directory_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path,
) -> None:
    store = FileTenantStore(tmp_path / "tenants.json")
    ring = KeyRing(has_directory=True)
    watch = DirectoryWatch(store, ring, 1.0)
    assert await watch.look()  # no file: an empty directory
    assert await store.replace(b"", directory_to_json(DIRECTORY))
    assert await watch.look()
    assert ring.check("Bearer kvm-one").name == "acme"
    (tmp_path / "tenants.json").write_text("{")
    assert not await watch.look()
    assert ring.check("Bearer kvm-one").name == "acme"
    (tmp_path / "tenants.json").write_text("{}")
    assert await watch.look()
    with pytest.raises(AuthenticationError):
        ring.check("Bearer kvm-one")


@pytest.mark.parametrize(
    "config", [AccessConfig(tenants_file="/tenants.json"), AccessConfig(tenants_in_redis=True)]
)
def test_a_directory_anywhere_closes_the_gateway_to_those_without_a_key(
    config: AccessConfig,
) -> None:
    ring = load_keys(config)
    with pytest.raises(AuthenticationError):
        ring.check("")
    with pytest.raises(StageRefusedError, match="could not be read"):
        ring.check("Bearer anything")


def test_keys_without_a_directory_have_the_limits_of_the_config() -> None:
    limits = TenantLimits(max_concurrent=3)
    ring = load_keys(AccessConfig(api_keys="one"), limits)
    assert ring.check("Bearer one").limits == limits
    assert KeyRing().check("").limits == TenantLimits()


async def test_a_directory_that_stays_broken_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tenants.json"
    file.write_text("{")
    watch = DirectoryWatch(FileTenantStore(file), KeyRing(has_directory=True), 1.0)
    with caplog.at_level("WARNING"):
        for _ in range(3):
            assert not await watch.look()
    assert caplog.text.count("tenant_directory_unreadable") == 1
    file.write_text("")
    assert await watch.look()
    file.write_text("{")
    with caplog.at_level("WARNING"):
        assert not await watch.look()
    assert caplog.text.count("tenant_directory_unreadable") == 2, "it had been read in between"


def test_a_directory_lies_in_one_place() -> None:
    assert directory_store(AccessConfig(), None) is None
    with pytest.raises(ConfigError, match="choose one"):
        directory_store(AccessConfig(tenants_file="x", tenants_in_redis=True), None)
    with pytest.raises(ConfigError, match=r"redis\.url"):
        directory_store(AccessConfig(tenants_in_redis=True), None)


def test_salts_of_two_tenants_are_never_equal() -> None:
    names, salts = ("a", "a:b", "1:a", "ab", ""), ("", "b", ":b", "1:a:")
    made = [Tenant(namespace=name).salted(salt) for name in names if name for salt in salts]
    assert len(set(made)) == len(made)
    assert Tenant().salted("x") == "0::x"
