"""Who may call, and how much at once: bearer keys, per-key concurrency, drain.

Pure apart from reading the key file at start. Tests: tests/unit/gateway/test_access.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmesh.core.errors import AuthenticationError, ConfigError
from kvmesh.core.types import Refusal, RefusalReason
from services.gateway.config import AccessConfig
from services.gateway.errors import Stage, StageRefusedError

QUOTA_RETRY_MS = 1000
DRAIN_RETRY_MS = 1000


def bearer_key(authorization: str) -> str:
    """The key in an Authorization header; empty without one."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyRing:
    """The keys that are accepted, held as digests only.

    Args:
        keys: without any, everyone may call.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str) -> str:
        """Checks an Authorization header.

        Returns:
            A name for the caller that does not reveal the key; empty for a caller without one.

        Raises:
            AuthenticationError: the key is missing or not accepted.
        """
        key = bearer_key(authorization)
        digest = _digest(key)
        # All are compared, so that the time taken does not say which one was close.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        if self._digests and not any(found):
            raise AuthenticationError(
                "the API key is not accepted" if key else "no API key: send Authorization: Bearer"
            )
        return digest.hex()[:16] if key else ""


def load_keys(config: AccessConfig) -> KeyRing:
    """The key ring of a config.

    Raises:
        ConfigError: the key file cannot be read or holds no key.
    """
    keys = [key.strip() for key in config.api_keys.split(",") if key.strip()]
    if config.api_keys_file:
        try:
            lines = Path(config.api_keys_file).read_text().splitlines()
        except OSError as error:
            raise ConfigError(
                f"access.api_keys_file {config.api_keys_file}: {error.strerror}"
            ) from error
        from_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not from_file:
            # An empty file must not open the gateway to everyone.
            raise ConfigError(f"access.api_keys_file {config.api_keys_file} holds no key")
        keys += from_file
    return KeyRing(keys)


class Admission:
    """Counts requests and says no when draining or over quota.

    Args:
        max_per_key: requests of one key at once; 0 is no limit.
    """

    def __init__(self, max_per_key: int) -> None:
        self._max_per_key = max_per_key
        self._open: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_open(self) -> int:
        """Requests admitted and not finished."""
        return self._open.total()

    @contextmanager
    def admit(self, caller: str) -> Iterator[None]:
        """Holds a place for a request of `caller`.

        Raises:
            StageRefusedError: draining, or the caller's quota is used up.
        """
        if self.draining:
            message = "this gateway is draining; another one will take the request"
            refusal = Refusal(RefusalReason.DRAINING, message, retry_after_ms=DRAIN_RETRY_MS)
            raise StageRefusedError(refusal, Stage.GATEWAY)
        if 0 < self._max_per_key <= self._open[caller]:
            message = f"this key may have {self._max_per_key} requests at once"
            refusal = Refusal(RefusalReason.QUOTA, message, retry_after_ms=QUOTA_RETRY_MS)
            raise StageRefusedError(refusal, Stage.GATEWAY)
        self._open[caller] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open[caller] -= 1
            if self._open[caller] == 0:
                del self._open[caller]
            if not self._open:
                self._idle.set()

    async def drain(self) -> None:
        """Takes nothing new and waits until all that was admitted is finished."""
        self.draining = True
        await self._idle.wait()
