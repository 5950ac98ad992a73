"""Finds the Redis server that is the master now, by asking its sentinels.

Follows Redis' guidelines for clients: the sentinel that answers first is asked first the next time,
and a server is the master only if it says so itself. Tests:
tests/integration/test_redis_sentinel.py.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, urlsplit

from kvmesh.core.errors import ConfigError
from kvmesh.metadata.redis_library import NoBackoff, RedisError, Retry, redis
from kvmesh.metadata.store import StoreUnavailableError

SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""URL schemes that name sentinels, with the scheme of the servers behind them."""

_PORT = 26379


def names_sentinels(url: str) -> bool:
    """Whether a URL names sentinels, not the server itself."""
    return url.partition("://")[0] in SCHEMES


class RedisMasters:
    """Asks `redis+sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/NAME[/NUMBER]`.

    Args:
        password: of the servers, if it is not part of the URL. Sentinels are asked without one, and
            with that of the servers where none of them answers so.
        timeout_s: longest time for one question.

    Raises:
        ConfigError: the URL cannot be parsed.
    """

    def __init__(self, url: str, password: str, timeout_s: float) -> None:
        where = urlsplit(url)
        self._login, self._at, hosts = where.netloc.rpartition("@")
        self._name, _, number = where.path.strip("/").partition("/")
        self._sentinels = [_address(each) for each in hosts.split(",")]
        if not (self._name and (number or "0").isdecimal()):
            raise ConfigError(
                "redis.url: give sentinels as redis+sentinel://HOST:PORT,HOST:PORT/NAME, or with "
                "/NAME/NUMBER at the end; NAME is the master's name in their configuration"
            )
        self._server = where._replace(scheme=SCHEMES[where.scheme], path=f"/{number or 0}")
        self._password = password
        self._timeout_s = timeout_s

    async def url(self) -> str:
        """URL of the master, with the login of the servers.

        Raises:
            StoreUnavailableError: no sentinel knows a server that is the master and answers.
        """
        told: list[str] = []
        has_login = bool(self._login or self._password)
        for with_login in (False, True) if has_login else (False,):
            for sentinel in list(self._sentinels):
                try:
                    url = await self._ask(sentinel, with_login=with_login)
                except (RedisError, OSError) as error:
                    told.append(f"{sentinel}: {type(error).__name__}: {error}")
                    continue
                self._sentinels.remove(sentinel)
                self._sentinels.insert(0, sentinel)
                return url
        raise StoreUnavailableError(f"no sentinel knows a master {self._name}: {'; '.join(told)}")

    async def _ask(self, sentinel: str, *, with_login: bool) -> str:
        login = f"{self._login}{self._at}" if with_login else ""
        asked = self._server._replace(netloc=f"{login}{sentinel}", path="")
        async with self._connection(asked, with_login=with_login) as client:
            found: Any = await client.sentinel_get_master_addr_by_name(self._name)
        if not found:
            raise RedisError(f"it knows no master {self._name}")
        host, port = (_text(word) for word in found)
        netloc = f"{self._login}{self._at}[{host}]:{port}" if ":" in host else ""
        server = self._server._replace(netloc=netloc or f"{self._login}{self._at}{host}:{port}")
        async with self._connection(server, with_login=True) as client:
            told: Any = await client.role()
        if _text(told[0]) != "master":
            raise RedisError(f"{host}:{port} is not the master any more, or not yet")
        return server.geturl()

    def _connection(self, url: SplitResult, *, with_login: bool) -> redis.Redis:
        login: dict[str, Any] = {}
        if with_login and self._password:
            login["password"] = self._password
        return redis.Redis.from_url(
            url.geturl(),
            socket_timeout=self._timeout_s,
            socket_connect_timeout=self._timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **login,
        )


def _address(text: str) -> str:
    try:
        parts = urlsplit(f"//{text}")
        port, host = parts.port or _PORT, parts.hostname
    except ValueError:
        host = None
    if not host:
        raise ConfigError(f"redis.url: {text!r} is not the HOST:PORT of a sentinel")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)
