"""Lua scripts of the pool's state in Redis. Each runs as one atomic step.

Keys, all under a prefix P as in scripts.py:

    P pool:replicas              set: kvmanagers that published their counts of reads
    P pool:knowledge:<replica>   the counts that it published, with a TTL
    P pool:orders:<worker>       list: orders that the worker has not taken yet, with a TTL

Tests: tests/contract/test_pool_store.py.
"""

from __future__ import annotations

PUT_KNOWLEDGE = """
local prefix, replica, knowledge, ttl_ms = unpack(ARGV)
redis.call('SET', prefix .. 'pool:knowledge:' .. replica, knowledge, 'PX', ttl_ms)
redis.call('SADD', prefix .. 'pool:replicas', replica)
return 1
"""
"""ARGV: prefix, replica, knowledge, ttl ms."""

ALL_KNOWLEDGE = """
local prefix = ARGV[1]
local found = {}
for _, replica in ipairs(redis.call('SMEMBERS', prefix .. 'pool:replicas')) do
  local knowledge = redis.call('GET', prefix .. 'pool:knowledge:' .. replica)
  if knowledge then
    found[#found + 1] = knowledge
  else
    redis.call('SREM', prefix .. 'pool:replicas', replica)
  end
end
return found
"""
"""ARGV: prefix. Returns the knowledge of each replica."""

PUT_ORDERS = """
local key = ARGV[1] .. 'pool:orders:' .. ARGV[2]
for at = 4, #ARGV do redis.call('RPUSH', key, ARGV[at]) end
redis.call('PEXPIRE', key, ARGV[3])
return 1
"""
"""ARGV: prefix, worker, ttl ms, orders."""

TAKE_ORDERS = """
local found = {}
for at = 2, #ARGV do
  local key = ARGV[1] .. 'pool:orders:' .. ARGV[at]
  found[#found + 1] = redis.call('LRANGE', key, 0, -1)
  redis.call('DEL', key)
end
return found
"""
"""ARGV: prefix, workers. Returns the orders of each."""
