from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.metadata.tenants import (
    Directory,
    DirectoryError,
    KeyRecord,
    digest_of,
    directory_from_json,
    directory_to_json,
)
from kvmesh.policy.quota import TenantLimits

ONE = KeyRecord(digest_of("kvm-one"), "acme", "2026-11-21")
FULL = (
    Directory()
    .with_tenant("acme", TenantLimits(60, 1000, 4, priority=-1, weight=2.5, tpot_ms=50))
    .with_tenant("b.c_d-1", TenantLimits())
    .with_key(ONE)
)


def test_a_document_round_trips_and_holds_no_key() -> None:
    raw = directory_to_json(FULL)
    assert directory_from_json(raw) == FULL
    assert b"kvm-one" not in raw


def test_keys_are_found_by_digest_only() -> None:
    tenant = FULL.tenant_of(digest_of("kvm-one"))
    assert tenant is not None
    assert tenant.name == "acme"
    assert FULL.tenant_of("kvm-one") is None


def test_a_key_is_removed_by_an_id_that_is_its_alone() -> None:
    assert FULL.without_key(ONE.key_id).keys == {}
    for key_id in ("", "zzzz"):
        with pytest.raises(DirectoryError, match="no key has"):
            FULL.without_key(key_id)


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "a:b", "ä"])
def test_names_that_are_not_allowed(name: str) -> None:
    with pytest.raises(DirectoryError, match="letters"):
        Directory().with_tenant(name, TenantLimits())


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"tenant": {}},
        {"tenants": []},
        {"tenants": {"a": 3}},
        {"tenants": {"a": {"rate": 3}}},
        {"tenants": {"a": {"requests_per_min": "3"}}},
        {"tenants": {"a": {"requests_per_min": True}}},
        {"tenants": {"a": {"requests_per_min": -1}}},
        {"tenants": {"a": {"weight": 0}}},
        {"tenants": {"a": {"itl_ms": -1}}},
        {"tenants": {"a": {"tpot_ms": 2**32}}},
        {"tenants": {"a": {"weight": float("nan")}}},
        {"keys": [3]},
        {"keys": [{"sha256": "ff", "tenant": "a"}]},
        {"keys": [{"sha256": "f" * 64, "tenant": "a"}]},
        {"keys": {}},
    ],
)
def test_a_document_that_is_wrong_says_so(document: Any) -> None:
    with pytest.raises(DirectoryError):
        directory_from_json(json.dumps(document).encode())


@pytest.mark.parametrize("raw", [b"{", b"\xff", b"[" * 100_000])
def test_what_is_not_json_says_so(raw: bytes) -> None:
    with pytest.raises(DirectoryError, match="not JSON"):
        directory_from_json(raw)
