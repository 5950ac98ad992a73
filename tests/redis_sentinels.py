"""Two real Redis servers, one a replica of the other, and three sentinels that watch them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from kvmesh.metadata.server_binary import find_redis_binary, free_port
from tests.waiting import until

NAME = "kvmesh-master"
NUM_SENTINELS = 3
DOWN_MS = 1000
"""A master that is silent for so long is down."""

ANSWER_S = 2.0
ASKED_AGAIN_S = 2.0


class Server:
    """One server or sentinel; ended and started again at will, on the same port.

    Args:
        settings: lines of its configuration, to which it adds what it learns.
    """

    def __init__(self, folder: Path, port: int, settings: list[str], *flags: str) -> None:
        folder.mkdir()
        self.port = port
        self._folder = folder
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        lines = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", *settings]
        (folder / "conf").write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        binary = find_redis_binary()
        assert binary is not None
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary, self._folder / "conf", *self._flags], stdout=log, stderr=log
            )

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, *, kill: bool = False) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill() if kill else process.terminate()
            process.wait()

    def client(self, password: str = "") -> Any:
        return redis.Redis(
            port=self.port, protocol=2, password=password or None, socket_timeout=ANSWER_S
        )


class Sentinels:
    """All of them.

    Attributes:
        url: as services take it.
    """

    def __init__(self, servers: list[Server], sentinels: list[Server], password: str) -> None:
        self.servers = servers
        self.sentinels = sentinels
        self._password = password
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in sentinels)
        login = f":{password}@" if password else ""
        self.url = f"redis+sentinel://{login}{hosts}/{NAME}"

    async def master(self) -> Server:
        """Who is the master, by the first sentinel that answers."""
        for sentinel in self.sentinels:
            with contextlib.suppress(RedisError, OSError):
                async with sentinel.client() as client:
                    found: Any = await client.sentinel_get_master_addr_by_name(NAME)
                    return next(each for each in self.servers if each.port == int(found[1]))
        raise AssertionError("no sentinel answers")

    async def failed_over(self, before: Server) -> Server:
        """Waits until another server is the master, and the one before says so, if it answers."""
        await until(lambda: self._is_over(before), "another server is the master")
        return await self.master()

    async def demoted(self, master: Server) -> Server:
        """Tells the sentinels to choose another master, until they have.

        They give up on a failover when a stall has made their view of the replica too old, and do
        not try again by themselves while the master lives. If they take the next master for down
        in a stall, this one is the master again.
        """
        now = asyncio.get_running_loop().time
        asked_at = -math.inf

        async def is_over() -> bool:
            nonlocal asked_at
            if await self.master() is master and now() - asked_at > ASKED_AGAIN_S:
                asked_at = now()
                # An error says that one is under way, or that no replica is fit yet.
                with contextlib.suppress(RedisError, OSError):
                    async with self.sentinels[0].client() as client:
                        await client.execute_command("SENTINEL FAILOVER", NAME)
            return await self._is_over(master)

        await until(is_over, "the sentinels have chosen another master")
        return await self.master()

    async def hurry(self) -> None:
        """Lets sentinels look round more often than every ten seconds.

        After a stall of two seconds they do nothing for a while, usually half a minute.
        """
        for sentinel in self.sentinels:

            async def told(sentinel: Server = sentinel) -> bool:
                with contextlib.suppress(RedisError, OSError):
                    async with sentinel.client() as client:
                        words = ("INFO-PERIOD", 200, "PUBLISH-PERIOD", 200, "TILT-PERIOD", 2000)
                        await client.execute_command("SENTINEL DEBUG", *words)
                        return True
                return False

            await until(told, "a sentinel answers")

    async def has_replica(self) -> None:
        """Waits until a replica that every sentinel could promote has all that is written now."""
        goals: dict[int, int] = {}

        async def fact() -> bool:
            with contextlib.suppress(RedisError, OSError):
                for sentinel in self.sentinels:
                    async with sentinel.client() as client:
                        told: Any = await client.sentinel_master(NAME)
                        others, replicas = told["num-other-sentinels"], told["num-slaves"]
                        if others < NUM_SENTINELS - 1 or replicas < 1:
                            return False
                master = await self.master()
                async with master.client(self._password) as client:
                    told = await client.info("replication")
                    replica = told.get("slave0", {})
                    goal = goals.setdefault(master.port, told["master_repl_offset"])
                    has_all = replica.get("offset", 0) >= goal
                    return bool(replica.get("state") == "online" and has_all)
            return False

        await until(fact, "the replica has it all")

    async def _is_over(self, before: Server) -> bool:
        now = await self.master()
        is_other = now is not before and await self._role(now) == "master"
        return is_other and await self._role(before) != "master"

    async def _role(self, server: Server) -> str:
        with contextlib.suppress(RedisError, OSError):
            async with server.client(self._password) as client:
                told: Any = await client.role()
                return str(told[0].decode())
        return ""


@contextmanager
def _running(*servers: Server) -> Iterator[None]:
    try:
        for each in servers:
            each.start()
        yield
    finally:
        for each in servers:
            each.stop(kill=True)


@asynccontextmanager
async def redis_sentinels(folder: Path, password: str = "") -> AsyncIterator[Sentinels]:
    """Servers and sentinels that know each other.

    Args:
        password: of the servers.
    """
    ports = [free_port() for _ in range(2)]
    plain = ['save ""', "appendonly no", "repl-diskless-sync-delay 0", "repl-timeout 5"]
    if password:
        plain += [f"requirepass {password}", f"masterauth {password}"]
    servers = [
        Server(folder / "first", ports[0], plain),
        Server(folder / "second", ports[1], [*plain, f"replicaof 127.0.0.1 {ports[0]}"]),
    ]
    watching = [
        f"sentinel monitor {NAME} 127.0.0.1 {ports[0]} 2",
        f"sentinel down-after-milliseconds {NAME} {DOWN_MS}",
        f"sentinel failover-timeout {NAME} 5000",
        *([f"sentinel auth-pass {NAME} {password}"] if password else []),
    ]
    sentinels = [
        Server(folder / f"sentinel-{number}", free_port(), watching, "--sentinel")
        for number in range(NUM_SENTINELS)
    ]
    with _running(*servers, *sentinels):
        found = Sentinels(servers, sentinels, password)
        await found.hurry()
        await found.has_replica()
        yield found
