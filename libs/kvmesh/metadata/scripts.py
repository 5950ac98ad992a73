"""Lua scripts of the Redis stores. Each runs as one atomic step inside Redis.

Keys, all under a prefix P. Its braces keep them in one slot of a Redis Cluster, so that a script
may build them itself:

    P held:<slot>         set: block hashes that the slot holds
                          (and the other names of `core/block_names.py`)
    P slot:<slot>         hash: worker, incarnation, cluster, namespace, sequence, live
    P lease:<slot>        exists, with a TTL, while the slot's lease lasts
    P slots               set: all slots that are not swept yet
    P workers             hash: worker id -> its live slot
    P log                 stream: the last changes of slots, see `_LOG`

There is no index by hash: schedulers build their own from the log, and a lookup here reads each
worker's set (docs/adr/0039-no-index-in-redis.md).
Tests: tests/contract/test_metadata_store.py.
"""

from __future__ import annotations

from kvmesh.core.block_names import DISK_TURN, HOST_TURN, STATE_TURN, TELLS_STATES, TELLS_TIERS
from kvmesh.core.slots import SLOT_WIDTH

LOG_LENGTH = 8192
"""Minimum number of entries kept in the log; each has at most 256 hashes, 4 KiB."""

# An entry's id contains the time, so a Redis that lost its data or restored old data does not have
# an entry with the id of a lost one.
_LOG = f"""
local function log(prefix, slot, ...)
  return redis.call('XADD', prefix .. 'log', 'MAXLEN', '~', {LOG_LENGTH}, '*', 'slot', slot, ...)
end
local function ended(prefix, slot)
  local record = prefix .. 'slot:' .. slot
  if redis.call('EXISTS', record) == 0 then return end
  if redis.call('HSETNX', record, 'ended', '1') == 1 then log(prefix, slot, 'state', 'ended') end
end
"""

# Slot numbers are times in microseconds, so that an emptied Redis does not reuse old numbers.
_OPEN = (
    _LOG
    + f"""
local function open(prefix, worker, incarnation, cluster, namespace, live, lease_ms)
  local time = redis.call('TIME')
  local number = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local slot = string.format('%0{SLOT_WIDTH}x', number)
  while redis.call('SISMEMBER', prefix .. 'slots', slot) == 1 do
    number = number + 1
    slot = string.format('%0{SLOT_WIDTH}x', number)
  end
  redis.call('HSET', prefix .. 'slot:' .. slot, 'worker', worker, 'incarnation', incarnation,
    'cluster', cluster, 'namespace', namespace, 'sequence', '0', 'live', live)
  redis.call('SADD', prefix .. 'slots', slot)
  redis.call('SET', prefix .. 'lease:' .. slot, '1', 'PX', lease_ms)
  log(prefix, slot, 'worker', worker, 'incarnation', incarnation, 'cluster', cluster,
    'namespace', namespace, 'state', live == '1' and 'live' or 'loading')
  return slot
end
"""
)

_PROMOTE = """
local function promote(prefix, worker, slot)
  local before = redis.call('HGET', prefix .. 'workers', worker)
  if before and before ~= slot then
    redis.call('DEL', prefix .. 'lease:' .. before)
    ended(prefix, before)
  end
  redis.call('HSET', prefix .. 'workers', worker, slot)
end
"""

REGISTER = (
    _OPEN
    + _PROMOTE
    + """
local prefix, worker, incarnation, cluster, namespace, lease_ms = unpack(ARGV)
local slot = redis.call('HGET', prefix .. 'workers', worker)
if slot and redis.call('EXISTS', prefix .. 'lease:' .. slot) == 1 then
  local facts = redis.call('HMGET', prefix .. 'slot:' .. slot,
    'incarnation', 'cluster', 'namespace', 'sequence')
  if facts[1] == incarnation and facts[2] == cluster and facts[3] == namespace then
    redis.call('PEXPIRE', prefix .. 'lease:' .. slot, lease_ms)
    return {slot, facts[4]}
  end
end
slot = open(prefix, worker, incarnation, cluster, namespace, '1', lease_ms)
promote(prefix, worker, slot)
return {slot, '0'}
"""
)
"""ARGV: prefix, worker, incarnation, cluster, namespace, lease ms. Returns {slot, sequence}."""

BEGIN_SNAPSHOT = (
    _OPEN
    + """
local prefix, worker, incarnation, cluster, namespace, lease_ms = unpack(ARGV)
return open(prefix, worker, incarnation, cluster, namespace, '0', lease_ms)
"""
)
"""ARGV as REGISTER. Returns the slot."""

APPLY = (
    _LOG
    + _PROMOTE
    + """
local prefix, slot, lease_ms, live, sequence, final, stored, removed = unpack(ARGV)
local record, lease = prefix .. 'slot:' .. slot, prefix .. 'lease:' .. slot
if redis.call('EXISTS', lease) == 0 then return 'unknown' end
local facts = redis.call('HMGET', record, 'live', 'sequence', 'worker')
if facts[1] ~= live then return 'unknown' end
if live == '1' and tonumber(facts[2]) + 1 ~= tonumber(sequence) then return 'gap' end
local held = prefix .. 'held:' .. slot
local function take(joined, command)
  for first = 1, #joined, 16 * 256 do
    local hashes = {}
    for at = first, math.min(first + 16 * 256, #joined + 1) - 1, 16 do
      hashes[#hashes + 1] = string.sub(joined, at, at + 15)
    end
    redis.call(command, held, unpack(hashes))
  end
end
take(stored, 'SADD')
take(removed, 'SREM')
redis.call('PEXPIRE', lease, lease_ms)
if stored ~= '' or removed ~= '' then
  log(prefix, slot, 'stored', stored, 'removed', removed)
end
if final == '1' then
  redis.call('HSET', record, 'sequence', sequence, 'live', '1')
  if live == '0' then
    log(prefix, slot, 'state', 'live')
    promote(prefix, facts[3], slot)
  end
end
return 'applied'
"""
)
"""ARGV: prefix, slot, lease ms, live ('1' events, '0' snapshot), sequence, final ('1' when the
batch is complete), stored, removed. Returns a value of ApplyResult."""

RENEW = """
local prefix, lease_ms = ARGV[1], ARGV[2]
local told = {}
for i = 3, #ARGV, 2 do
  local slot, sequence = ARGV[i], ARGV[i + 1]
  local facts = redis.call('HMGET', prefix .. 'slot:' .. slot, 'live', 'sequence')
  local is_known = facts[1] == '1' and tonumber(facts[2]) == tonumber(sequence)
  told[#told + 1] = is_known and redis.call('PEXPIRE', prefix .. 'lease:' .. slot, lease_ms) or 0
end
return told
"""
"""ARGV: prefix, lease ms, then slot and sequence of each. Returns 1 for each that is renewed."""

FORGET = (
    _LOG
    + """
local prefix, slot = unpack(ARGV)
redis.call('DEL', prefix .. 'lease:' .. slot)
ended(prefix, slot)
return 1
"""
)
"""ARGV: prefix, slot."""

MOST_MATCHED = 64
"""Maximum number of workers that a lookup returns; if more match, those that seem to hold most."""

PROBES = 8
"""Number of a prompt's blocks that are probed to estimate that, including the first and the
last."""

MATCH = f"""
local prefix, namespace, hashes = unpack(ARGV)
local SLICE, total, parts = 128, #hashes / 16, {{}}
local function part(turn, number)
  local key = turn * total + number
  if not parts[key] then
    local names = {{}}
    for at = number * SLICE, math.min(number * SLICE + SLICE, total) - 1 do
      local hash = string.sub(hashes, at * 16 + 1, at * 16 + 16)
      names[#names + 1] = string.sub(hash, turn + 1) .. string.sub(hash, 1, turn)
    end
    parts[key] = names
  end
  return parts[key]
end
local function among(held, turn, number)
  return redis.call('SMISMEMBER', held, unpack(part(turn, number)))
end
local function run(held)
  local length = 0
  for number = 0, math.ceil(total / SLICE) - 1 do
    for _, is_in in ipairs(among(held, 0, number)) do
      if is_in == 0 then return length end
      length = length + 1
    end
  end
  return length
end
local function resumable(held, length)
  for number = math.ceil(length / SLICE) - 1, 0, -1 do
    local saved = among(held, {STATE_TURN}, number)
    for at = math.min(SLICE, length - number * SLICE), 1, -1 do
      if saved[at] == 1 then return number * SLICE + at end
    end
  end
  return 0
end
local function num_in(held, turn, length)
  local found = 0
  for number = 0, math.ceil(length / SLICE) - 1 do
    local is_in = among(held, turn, number)
    for at = 1, math.min(SLICE, length - number * SLICE) do found = found + is_in[at] end
  end
  return found
end
if total == 0 then return {{}} end
local probes, holders, found = {{'{TELLS_STATES.decode()}', '{TELLS_TIERS.decode()}'}}, {{}}, {{}}
for number = 0, {PROBES} - 1 do
  local at = math.floor(number * (total - 1) / ({PROBES} - 1))
  probes[#probes + 1] = string.sub(hashes, at * 16 + 1, at * 16 + 16)
end
for _, slot in ipairs(redis.call('HVALS', prefix .. 'workers')) do
  local held, most = prefix .. 'held:' .. slot, 0
  if redis.call('SISMEMBER', held, probes[3]) == 1 then
    local seen = redis.call('SMISMEMBER', held, unpack(probes))
    while seen[3 + most] == 1 do most = most + 1 end
    holders[#holders + 1] = {{slot=slot, most=most, states=seen[1] == 1, tiers=seen[2] == 1}}
  end
end
table.sort(holders, function(one, other) return one.most > other.most end)
for _, holder in ipairs(holders) do
  local held, length = prefix .. 'held:' .. holder.slot, 0
  local facts = redis.call('HMGET', prefix .. 'slot:' .. holder.slot,
    'worker', 'incarnation', 'cluster', 'live', 'namespace')
  if facts[4] == '1' and facts[5] == namespace
    and redis.call('EXISTS', prefix .. 'lease:' .. holder.slot) == 1 then
    length = run(held)
  end
  if length > 0 and holder.states then length = resumable(held, length) end
  if length > 0 then
    local host, disk = 0, 0
    if holder.tiers then
      host, disk = num_in(held, {HOST_TURN}, length), num_in(held, {DISK_TURN}, length)
    end
    found[#found + 1] = {{facts[1], facts[2], facts[3], length, host, disk}}
    if #found == {MOST_MATCHED} then break end
  end
end
return found
"""
"""ARGV: prefix, namespace, hashes. Returns {worker, incarnation, cluster, length, blocks of these
in host memory, blocks of these on disk} of each match."""

HOLDERS = """
local prefix, namespace, hashes = unpack(ARGV)
local names, found = {}, {}
for at = 1, #hashes, 16 do names[#names + 1] = string.sub(hashes, at, at + 15) end
for _, slot in ipairs(redis.call('HVALS', prefix .. 'workers')) do
  local facts = redis.call('HMGET', prefix .. 'slot:' .. slot, 'worker', 'live', 'namespace')
  if facts[2] == '1' and facts[3] == namespace
    and redis.call('EXISTS', prefix .. 'lease:' .. slot) == 1 then
    local held = redis.call('SMISMEMBER', prefix .. 'held:' .. slot, unpack(names))
    found[#found + 1] = {facts[1], table.concat(held)}
  end
end
return found
"""
"""ARGV: prefix, namespace, hashes. Returns {worker, a 1 or 0 for each hash} of each live slot."""

DEAD_SLOTS = (
    _LOG
    + """
local prefix = ARGV[1]
local dead = {}
for _, slot in ipairs(redis.call('SMEMBERS', prefix .. 'slots')) do
  if redis.call('EXISTS', prefix .. 'lease:' .. slot) == 0 then
    ended(prefix, slot)
    dead[#dead + 1] = slot
  end
end
return dead
"""
)
"""ARGV: prefix. Returns the slots without a lease."""

SWEEP = """
local prefix, slot, count = unpack(ARGV)
local record, held = prefix .. 'slot:' .. slot, prefix .. 'held:' .. slot
local facts = redis.call('HMGET', record, 'namespace', 'worker')
if redis.call('EXISTS', prefix .. 'lease:' .. slot) == 1 or not facts[1] then return {0, 1} end
local hashes = redis.call('SPOP', held, count)
if redis.call('EXISTS', held) == 1 then return {#hashes, 0} end
redis.call('DEL', record)
redis.call('SREM', prefix .. 'slots', slot)
if redis.call('HGET', prefix .. 'workers', facts[2]) == slot then
  redis.call('HDEL', prefix .. 'workers', facts[2])
end
return {#hashes, 1}
"""
"""ARGV: prefix, slot, maximum of blocks to remove. Returns {blocks removed, 1 if the slot is
gone}."""

STATISTICS = """
local prefix = ARGV[1]
local publishers, blocks = 0, 0
for _, slot in ipairs(redis.call('SMEMBERS', prefix .. 'slots')) do
  if redis.call('EXISTS', prefix .. 'lease:' .. slot) == 1
    and redis.call('HGET', prefix .. 'slot:' .. slot, 'live') == '1' then
    publishers = publishers + 1
    blocks = blocks + redis.call('SCARD', prefix .. 'held:' .. slot)
  end
end
return {publishers, blocks}
"""
"""ARGV: prefix. Returns {publishers, blocks}."""

SLOTS = """
local prefix = ARGV[1]
local found = {}
for _, slot in ipairs(redis.call('SMEMBERS', prefix .. 'slots')) do
  if redis.call('EXISTS', prefix .. 'lease:' .. slot) == 1 then
    local facts = redis.call('HMGET', prefix .. 'slot:' .. slot,
      'worker', 'incarnation', 'cluster', 'namespace', 'live')
    table.insert(facts, 1, slot)
    found[#found + 1] = facts
  end
end
return found
"""
"""ARGV: prefix. Returns {slot, worker, incarnation, cluster, namespace, live} of each slot."""

HELD = """
local page = redis.call('SSCAN', ARGV[1] .. 'held:' .. ARGV[2], ARGV[3], 'COUNT', ARGV[4])
return {page[1], table.concat(page[2])}
"""
"""ARGV: prefix, slot, cursor, approximate page size. Returns {next cursor, hashes}."""

LOG_END = (
    _LOG
    + """
local last = redis.call('XREVRANGE', ARGV[1] .. 'log', '+', '-', 'COUNT', 1)
return last[1] and last[1][1] or log(ARGV[1], '')
"""
)
"""ARGV: prefix. Returns the id of the last entry; in an empty log it adds one about no slot."""

LOG_AFTER = """
local key, id, count = ARGV[1] .. 'log', ARGV[2], ARGV[3]
if #redis.call('XRANGE', key, id, id) == 0 then return false end
return redis.call('XRANGE', key, '(' .. id, '+', 'COUNT', count)
"""
"""ARGV: prefix, id of the entry before, maximum of entries. Returns nil if the log has no such
entry, else {id, {name, value, ...}} of each later entry."""

# Writes a key, because a full or read-only Redis still answers PING.
PROBE = """
local key = ARGV[1] .. 'probe'
redis.call('SET', key, '1')
redis.call('DEL', key)
return 1
"""
"""ARGV: prefix."""

LIST_WORKERS = """
local prefix = ARGV[1]
local found = {}
for _, worker in ipairs(redis.call('SMEMBERS', prefix .. 'worker_ids')) do
  local info = redis.call('GET', prefix .. 'worker:' .. worker)
  if info then
    found[#found + 1] = worker
    found[#found + 1] = info
  else
    redis.call('SREM', prefix .. 'worker_ids', worker)
  end
end
return found
"""
"""ARGV: prefix. Returns worker ids and infos alternately."""

PUT_WORKER = """
local prefix, worker, info, ttl_ms = unpack(ARGV)
redis.call('SET', prefix .. 'worker:' .. worker, info, 'PX', ttl_ms)
redis.call('SADD', prefix .. 'worker_ids', worker)
return 1
"""
"""ARGV: prefix, worker, info, ttl ms."""

REMOVE_WORKER = """
local prefix, worker = unpack(ARGV)
redis.call('DEL', prefix .. 'worker:' .. worker)
redis.call('SREM', prefix .. 'worker_ids', worker)
return 1
"""
"""ARGV: prefix, worker."""

PUT_GROUP = """
local prefix, scenario, wish = unpack(ARGV)
redis.call('HSET', prefix .. 'groups', scenario, wish)
return 1
"""
"""ARGV: prefix, scenario, wish."""

LIST_GROUPS = """
return redis.call('HGETALL', ARGV[1] .. 'groups')
"""
"""ARGV: prefix. Returns scenarios and wishes alternately."""

REMOVE_GROUP = """
local prefix, scenario = unpack(ARGV)
redis.call('HDEL', prefix .. 'groups', scenario)
return 1
"""
"""ARGV: prefix, scenario."""

PUT_ADAPTERS = """
local prefix, wishes = unpack(ARGV)
redis.call('SET', prefix .. 'adapters', wishes)
return 1
"""
"""ARGV: prefix, wishes."""

ADAPTERS = """
return redis.call('GET', ARGV[1] .. 'adapters') or ''
"""
"""ARGV: prefix. Returns the wishes; empty if there are none."""

HOLD_LEASE = """
local prefix, name, owner, ttl_ms = unpack(ARGV)
local key = prefix .. 'planner_lease:' .. name
local holder = redis.call('GET', key)
if holder and holder ~= owner then return 0 end
redis.call('SET', key, owner, 'PX', ttl_ms)
return 1
"""
"""ARGV: prefix, lease, owner, ttl ms. Returns 1 if the owner holds it now."""

RELEASE_LEASE = """
local prefix, name, owner = unpack(ARGV)
local key = prefix .. 'planner_lease:' .. name
if redis.call('GET', key) == owner then redis.call('DEL', key) end
return 1
"""
"""ARGV: prefix, lease, owner."""
