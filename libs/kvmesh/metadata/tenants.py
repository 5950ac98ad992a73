"""The tenant directory: tenants, their limits, and digests of their API keys. One JSON document.

Keys are 256 random bits, so one SHA-256 is enough: no list of likely keys helps an attacker. The
document is in a file or in Redis (`tenant_store.py`). Tests: tests/unit/metadata/test_tenants.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.errors import KvMeshError
from kvmesh.policy.quota import Tenant, TenantLimits

KEY_PREFIX = "kvm-"
ID_CHARS = 12
MAX_LIMIT_MS = 2**32 - 1
"""Largest limit on a time, in milliseconds: messages hold it in 32 bits."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LIMITS = {item.name: item.type for item in dataclasses.fields(TenantLimits)}


class DirectoryError(KvMeshError):
    """The document is not a tenant directory; the message says where it is wrong."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key as it is stored.

    Attributes:
        digest: SHA-256 of the key, in hex.
        created: date, for people.
    """

    digest: str
    tenant: str
    created: str = ""

    @property
    def key_id(self) -> str:
        """Short name of the key that does not reveal it."""
        return self.digest[:ID_CHARS]


@dataclass(frozen=True, slots=True)
class Directory:
    """All tenants and keys; `keys` by digest."""

    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    keys: Mapping[str, KeyRecord] = field(default_factory=dict)

    def tenant_of(self, digest: str) -> Tenant | None:
        """Returns the tenant that owns a key; None if the key is unknown."""
        # A dict lookup is safe: its timing reveals something about a digest, not about a key.
        record = self.keys.get(digest)
        if record is None:
            return None
        name = record.tenant
        return Tenant(name, self.tenants[name], is_known=True, namespace=name)

    def with_tenant(self, name: str, limits: TenantLimits) -> Directory:
        """Returns a directory in which the tenant has these limits.

        Raises:
            DirectoryError: the name or a limit is not allowed.
        """
        if not _NAME.fullmatch(name):
            raise DirectoryError(f"tenant {name!r}: 1 to 64 letters, digits, dots, - or _")
        _check_limits(name, limits)
        return dataclasses.replace(self, tenants={**self.tenants, name: limits})

    def with_key(self, record: KeyRecord) -> Directory:
        """Returns a directory with one more key, whose tenant must exist."""
        assert record.tenant in self.tenants, f"{record.tenant} is not in the directory"
        return dataclasses.replace(self, keys={**self.keys, record.digest: record})

    def without_key(self, key_id: str) -> Directory:
        """Returns a directory without a key.

        Raises:
            DirectoryError: no key, or more than one, has this id.
        """
        found = [digest for digest in self.keys if key_id and digest.startswith(key_id)]
        if len(found) != 1:
            counted = f"{len(found)} keys have" if found else "no key has"
            raise DirectoryError(f"{counted} the id {key_id!r}")
        left = {digest: key for digest, key in self.keys.items() if digest != found[0]}
        return dataclasses.replace(self, keys=left)


def digest_of(key: str) -> str:
    """Returns the digest that is stored instead of a key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def directory_to_json(directory: Directory) -> bytes:
    """Returns the directory as a JSON document that people can read."""
    document = {
        "tenants": {
            name: dataclasses.asdict(limits) for name, limits in sorted(directory.tenants.items())
        },
        "keys": [
            {"sha256": key.digest, "tenant": key.tenant, "created": key.created}
            for key in directory.keys.values()
        ],
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def directory_from_json(raw: bytes) -> Directory:
    """Returns the directory in a JSON document.

    Raises:
        DirectoryError: the document is no tenant directory.
    """
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DirectoryError(f"not JSON: {error}") from error
    if not isinstance(document, dict) or set(document) - {"tenants", "keys"}:
        raise DirectoryError("must be an object with `tenants` and `keys`")
    tenants, keys = document.get("tenants", {}), document.get("keys", [])
    if not isinstance(tenants, dict) or not isinstance(keys, list):
        raise DirectoryError("`tenants` must be an object, `keys` a list")
    directory = Directory()
    for name, limits in tenants.items():
        directory = directory.with_tenant(name, _limits(name, limits))
    records = [_key_record(entry, directory) for entry in keys]
    return dataclasses.replace(directory, keys={record.digest: record for record in records})


def _limits(name: str, given: Any) -> TenantLimits:
    if not isinstance(given, dict) or set(given) - set(_LIMITS):
        raise DirectoryError(f"tenant {name!r}: an object with any of {', '.join(_LIMITS)}")
    for field_name, value in given.items():
        kinds = (int, float) if field_name in ("weight", "group_share") else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise DirectoryError(f"tenant {name!r}: {field_name} must be a number, got {value!r}")
    return TenantLimits(**given)


def _check_limits(name: str, limits: TenantLimits) -> None:
    for field_name in ("requests_per_min", "tokens_per_min", "max_concurrent"):
        value = getattr(limits, field_name)
        if not 0 <= value < 2**40:
            raise DirectoryError(f"tenant {name!r}: {field_name} must be 0 or more, got {value}")
    for field_name in ("ttft_ms", "tpot_ms", "itl_ms"):
        value = getattr(limits, field_name)
        if not 0 <= value <= MAX_LIMIT_MS:
            text = f"{field_name} must be 0 to {MAX_LIMIT_MS}, got {value}"
            raise DirectoryError(f"tenant {name!r}: {text}")
    if not 0 <= limits.group_share <= 1:
        text = f"group_share must be 0 to 1, got {limits.group_share}"
        raise DirectoryError(f"tenant {name!r}: {text}")
    if not (math.isfinite(limits.weight) and limits.weight > 0):
        raise DirectoryError(f"tenant {name!r}: weight must be more than 0, got {limits.weight}")


def _key_record(entry: Any, directory: Directory) -> KeyRecord:
    if not isinstance(entry, dict):
        raise DirectoryError("a key must be an object")
    digest, tenant = entry.get("sha256"), entry.get("tenant")
    if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
        raise DirectoryError("a key needs `sha256`, 64 hex digits")
    if not (isinstance(tenant, str) and tenant in directory.tenants):
        raise DirectoryError(f"key {digest[:ID_CHARS]}: tenant {tenant!r} is not in `tenants`")
    return KeyRecord(digest, tenant, str(entry.get("created", "")))
