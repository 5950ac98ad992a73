"""Tenants' usage in Redis, shared by all gateways: one script admits, one settles.

Keys, under a prefix P: `P quota:<tenant>` is a hash with `requests` and `tokens`, each the time
(ms) at which all usage is paid for. `P open:<tenant>` is a hash from gateway to `count:until`: the
number of requests that the gateway has open, and when that claim ends without renewal. The
arithmetic is that of `policy/quota.py`. Tests: tests/contract/test_quota.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmesh.metadata.redis_answers import understanding
from kvmesh.policy.quota import Quota, QuotaRefusal, TenantLimits

if TYPE_CHECKING:
    from kvmesh.metadata.redis_client import RedisClient

_COMMON = """
local prefix, tenant, owner = ARGV[1], ARGV[2], ARGV[3]
local mine, lease_ms, burst_ms = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local per_min = {requests = tonumber(ARGV[7]), tokens = tonumber(ARGV[8])}
local max_open = tonumber(ARGV[9])
local usage, open = prefix .. 'quota:' .. tenant, prefix .. 'open:' .. tenant
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + tonumber(time[2]) / 1000

local function busy_until(kind)
  return tonumber(redis.call('HGET', usage, kind) or '0')
end
local function wait_ms(kind)
  if per_min[kind] == 0 then return 0 end
  local tolerance = math.max(0, burst_ms - 60000 / per_min[kind])
  return busy_until(kind) - tolerance - now
end
local function charge(kind, units)
  if per_min[kind] == 0 or units == 0 then return end
  local after = math.max(busy_until(kind), now) + units * 60000 / per_min[kind]
  redis.call('HSET', usage, kind, string.format('%.3f', after))
  local ttl = math.ceil(after - now) + 1000
  if redis.call('PTTL', usage) < ttl then redis.call('PEXPIRE', usage, ttl) end
end
local function claim()
  if max_open == 0 then return end
  if mine == 0 then
    redis.call('HDEL', open, owner)
  else
    redis.call('HSET', open, owner, mine .. ':' .. string.format('%.0f', now + lease_ms))
    redis.call('PEXPIRE', open, lease_ms)
  end
end
"""

ACQUIRE = (
    _COMMON
    + """
if max_open > 0 then
  local total, claims = mine, redis.call('HGETALL', open)
  for i = 1, #claims, 2 do
    local count, ends = string.match(claims[i + 1], '(%d+):(%d+)')
    if tonumber(ends) <= now then
      redis.call('HDEL', open, claims[i])
    elseif claims[i] ~= owner then
      total = total + tonumber(count)
    end
  end
  if total > max_open then return {'max_concurrent', 1000} end
end
for _, kind in ipairs({'requests', 'tokens'}) do
  local wait = wait_ms(kind)
  if wait > 0 then return {kind .. '_per_min', math.ceil(wait)} end
end
charge('requests', 1)
claim()
return {}
"""
)

SETTLE = (
    _COMMON
    + """
charge('tokens', tonumber(ARGV[10]))
claim()
return {}
"""
)


class RedisQuotaStore:
    """Admits requests of tenants over all gateways.

    Args:
        client: closed with the store.
        owner: name of this gateway, unique for each process and restart.
        burst_s: see `policy.quota.Rate`.
        lease_s: seconds without a settlement after which a gateway's open requests no longer count.
    """

    def __init__(self, client: RedisClient, owner: str, burst_s: float, lease_s: float) -> None:
        self._client = client
        self._owner = owner
        self._burst_ms = round(burst_s * 1000)
        self._lease_ms = round(lease_s * 1000)

    async def acquire(
        self, tenant: str, limits: TenantLimits, num_open: int
    ) -> QuotaRefusal | None:
        """Counts one more request; returns the limit that is used up, or None.

        Args:
            num_open: this gateway's requests of the tenant, including the new one.

        Raises:
            StoreUnavailableError: Redis did not answer; the request may have been counted.
        """
        found = await self._client.run(ACQUIRE, *self._arguments(tenant, limits, num_open))
        if found == []:
            return None
        with understanding():
            quota = Quota(found[0].decode())
            limit = {
                Quota.REQUESTS: limits.requests_per_min,
                Quota.TOKENS: limits.tokens_per_min,
                Quota.CONCURRENCY: limits.max_concurrent,
            }[quota]
            return QuotaRefusal(quota, limit, int(found[1]) / 1000)

    async def settle(
        self, tenant: str, limits: TenantLimits, num_open: int, num_tokens: int
    ) -> None:
        """Charges used tokens, and updates the number of this gateway's open requests.

        Raises:
            StoreUnavailableError: Redis did not answer; the tokens may have been charged.
        """
        await self._client.run(SETTLE, *self._arguments(tenant, limits, num_open), num_tokens)

    async def close(self) -> None:
        """Closes connections. May be called again."""
        await self._client.close()

    def _arguments(self, tenant: str, limits: TenantLimits, num_open: int) -> tuple[str | int, ...]:
        return (
            tenant,
            self._owner,
            num_open,
            self._lease_ms,
            self._burst_ms,
            limits.requests_per_min,
            limits.tokens_per_min,
            limits.max_concurrent,
        )
