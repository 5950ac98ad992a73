"""Authenticates callers by bearer keys from the configuration and the tenant directory.

Tests: tests/unit/gateway/tenants/test_access.py, tests/integration/test_gateway_tenants.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from kvmesh.core.errors import AuthenticationError, ConfigError
from kvmesh.core.named_values import listed
from kvmesh.core.text_files import UNREADABLE, why_unreadable
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.metadata.tenant_store import FileTenantStore, RedisTenantStore, TenantStore
from kvmesh.metadata.tenants import Directory, DirectoryError, digest_of, directory_from_json
from kvmesh.policy.quota import Tenant, TenantLimits
from kvmesh.telemetry.logs import event_logger
from services.gateway.config import AccessConfig
from services.gateway.errors import Stage, StageRefusedError

log = event_logger(__name__)

NOT_LOADED_RETRY_MS = 1000


def bearer_key(authorization: str) -> str:
    """The key in an Authorization header; empty without one."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class KeyRing:
    """The accepted keys, held only as digests.

    Args:
        keys: from the configuration; each key is a tenant of its own.
        defaults: limits of callers that are not in the directory.
        has_directory: callers need a key, and none is accepted before the directory is read.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        defaults: TenantLimits | None = None,
        *,
        has_directory: bool = False,
    ) -> None:
        self._digests = frozenset(digest_of(key) for key in keys)
        self._defaults = defaults or TenantLimits()
        self._nobody = Tenant("", self._defaults)
        self._has_directory = has_directory
        self._directory: Directory | None = None

    def use(self, directory: Directory) -> None:
        """Replaces the directory."""
        self._directory = directory

    def check(self, authorization: str) -> Tenant:
        """Checks an Authorization header.

        Returns:
            The calling tenant; its name does not reveal the key.

        Raises:
            AuthenticationError: the key is missing or not accepted.
            StageRefusedError: the directory could not be read yet.
        """
        key = bearer_key(authorization)
        is_demanded = bool(self._digests) or self._has_directory
        if not key and not is_demanded:
            return self._nobody
        digest = digest_of(key)
        if digest in self._digests:
            # Longer than names in the directory can be, so it equals none of them.
            return Tenant(digest[:16], self._defaults, namespace=digest + ":")
        if not is_demanded:
            return Tenant(digest[:16], self._defaults)
        if not key:
            raise AuthenticationError("no API key: send Authorization: Bearer")
        if self._directory is None and self._has_directory:
            message = "the tenant directory could not be read yet"
            refusal = Refusal(RefusalReason.BUSY, message, retry_after_ms=NOT_LOADED_RETRY_MS)
            raise StageRefusedError(refusal, Stage.GATEWAY)
        tenant = None if self._directory is None else self._directory.tenant_of(digest)
        if tenant is None:
            raise AuthenticationError("the API key is not accepted")
        return tenant


def load_keys(config: AccessConfig, defaults: TenantLimits | None = None) -> KeyRing:
    """The key ring of a config, before the directory is read.

    Raises:
        ConfigError: the key file cannot be read or holds no key.
    """
    keys = list(listed(config.api_keys))
    if config.api_keys_file:
        try:
            lines = Path(config.api_keys_file).read_text(encoding="utf-8").splitlines()
        except UNREADABLE as error:
            raise ConfigError(
                f"access.api_keys_file {config.api_keys_file}: {why_unreadable(error)}"
            ) from error
        from_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not from_file:
            # An empty file must not open the gateway to everyone.
            raise ConfigError(f"access.api_keys_file {config.api_keys_file} holds no key")
        keys += from_file
    has_directory = bool(config.tenants_file) or config.tenants_in_redis
    return KeyRing(keys, defaults, has_directory=has_directory)


class DirectoryWatch:
    """Keeps a key ring's directory up to date. While it cannot be read, the last one stays valid.

    Args:
        refresh_s: pause between two reads; a revoked key works for this long.
    """

    def __init__(self, store: TenantStore, ring: KeyRing, refresh_s: float) -> None:
        self._store = store
        self._ring = ring
        self._refresh_s = refresh_s
        self._seen: bytes | None = None
        self._failed = False

    async def look(self) -> bool:
        """Reads the directory once; False if that was not possible."""
        try:
            raw = await self._store.read()
            if raw == self._seen:
                return True
            directory = directory_from_json(raw) if raw else Directory()
        except (StoreUnavailableError, DirectoryError) as error:
            if not self._failed:  # logged once, not at each read
                log.warning("tenant_directory_unreadable", error=str(error))
            self._failed = True
            return False
        self._failed, self._seen = False, raw
        self._ring.use(directory)
        log.info(
            "tenant_directory_read",
            num_tenants=len(directory.tenants),
            num_keys=len(directory.keys),
        )
        return True

    async def run(self) -> None:
        """Reads the directory at intervals, until cancelled."""
        while True:
            await asyncio.sleep(self._refresh_s)
            await self.look()


def directory_store(config: AccessConfig, redis: RedisTenantStore | None) -> TenantStore | None:
    """The store of the configured directory; None without one.

    Raises:
        ConfigError: two stores are configured, or Redis is not.
    """
    if config.tenants_file and config.tenants_in_redis:
        raise ConfigError("choose one of access.tenants_file and access.tenants_in_redis")
    if config.tenants_file:
        return FileTenantStore(Path(config.tenants_file))
    if config.tenants_in_redis and redis is None:
        raise ConfigError("access.tenants_in_redis needs redis.url")
    return redis if config.tenants_in_redis else None
