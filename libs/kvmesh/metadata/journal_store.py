"""Journals of streams in Redis, from which another gateway can resume a stream.

A stream is a list under `P stream:<key>`: its head, then parts with records in the order of
writing. It is kept as long as the writing gateway may need it, and a short time after its end.
Tests: tests/unit/gateway/request/test_journal.py, tests/integration/test_gateway_resume.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvmesh.metadata.redis_answers import strings_of, understanding

if TYPE_CHECKING:
    from kvmesh.metadata.redis_client import RedisClient

_WRITE = """
local told = {}
for i = 2, #ARGV, 5 do
  local word, key = ARGV[i], ARGV[1] .. 'stream:' .. ARGV[i + 1]
  local head, records, life_ms = ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local length = 0
  if word == 'add' then
    length = records == '' and redis.call('LLEN', key) or redis.call('RPUSHX', key, records)
    if length > 0 and head ~= '' then redis.call('LSET', key, 0, head) end
  else
    redis.call('DEL', key)
    if word == 'begin' then
      length = redis.call('RPUSH', key, head, records)
    end
  end
  if life_ms ~= '' then
    redis.call('PEXPIRE', key, life_ms)
  end
  told[#told + 1] = length
end
return told
"""

_READ = """
local key = ARGV[1] .. 'stream:' .. ARGV[2]
local parts = redis.call('LRANGE', key, 0, -1)
redis.call('RPUSHX', key, ARGV[3])
return parts
"""

MAX_WRITES = 128
"""Maximum number of lines per script call, because a script blocks Redis."""


class Line(NamedTuple):
    """A write to a stream.

    Attributes:
        word: `begin` a stream, `add` to it, or `drop` it.
        head: of a new stream, or a new head of an old one; empty: unchanged.
        records: to add; may be empty.
        life_s: seconds that the stream is kept from now on; None: unchanged.
    """

    word: str
    key: str
    head: bytes = b""
    records: bytes = b""
    life_s: float | None = None


class RedisJournalStore:
    """Writes and reads streams.

    Args:
        client: closed by its creator, not by the store.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def write(self, lines: Sequence[Line]) -> list[bool]:
        """Writes lines in order, many in one call.

        Returns:
            For each line, whether the stream exists now.

        Raises:
            StoreUnavailableError: Redis did not answer; some lines may have been written.
        """
        found: list[bool] = []
        for start in range(0, len(lines), MAX_WRITES):
            arguments: list[bytes | str] = []
            for word, key, head, records, life_s in lines[start : start + MAX_WRITES]:
                life = "" if life_s is None else str(max(1, round(life_s * 1000)))
                arguments += (word, key, head, records, life)
            told = await self._client.ask(_WRITE, *arguments)
            with understanding():
                found += [int(length) > 0 for length in told]
        return found

    async def read(self, key: str, mark: bytes) -> list[bytes]:
        """Returns a stream's head and the parts that follow it; empty if there is none.

        Args:
            mark: records that the next reader finds behind them.

        Raises:
            StoreUnavailableError: Redis did not answer.
        """
        return strings_of(await self._client.ask(_READ, key, mark))
