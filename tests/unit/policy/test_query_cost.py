"""When queries travel instead of KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.policy.linear_time import LinearTime
from kvmesh.policy.query_cost import QueryTask, choose_query

TASK = QueryTask(new_tokens=16, remote_tokens=4096, num_layers=16, num_heads=32, head_dim=64)
FAST = LinearTime(call_s=0.0005, unit_s=1e-11)


def test_few_new_tokens_behind_a_long_prefix_are_asked() -> None:
    made = choose_query(TASK, FAST, compute_s=4.096)
    assert made.query
    assert "asking" in made.reason
    assert "computing 4096.0 ms" in made.reason


def test_a_short_prefix_is_computed() -> None:
    """Its round trips alone take longer."""
    short = replace(TASK, remote_tokens=4)
    assert not choose_query(short, FAST, compute_s=0.004).query


def test_many_new_tokens_are_not_asked() -> None:
    """Attention at the holder and a round trip for each chunk cost more than the prefix."""
    many = replace(TASK, new_tokens=16384, num_chunks=32)
    assert not choose_query(many, FAST, compute_s=0.4096).query


def test_a_fast_link_fetches() -> None:
    assert not choose_query(TASK, FAST, compute_s=4.096, fetch_s=0.001).query
    assert choose_query(TASK, FAST, compute_s=4.096, fetch_s=0.5).query


def test_without_a_measured_step_nothing_is_asked() -> None:
    assert not choose_query(TASK, FAST, compute_s=0.0).query


def test_the_papers_segment_is_where_attention_takes_as_long_as_the_way() -> None:
    """TokenLake 4.2: 568 tokens; 2 us a message, 25 GB/s, memory of 2 TB/s, hidden size 4,096."""
    hidden, latency_s, net, memory = 4096, 2e-6, 25e9, 2e12
    way_s = 2 * latency_s + 4 * hidden / net
    assert way_s == pytest.approx(4.655e-6, rel=1e-3)
    speed = LinearTime(way_s, 4 * hidden / memory / hidden)

    def attention_s(num_tokens: int) -> float:
        task = QueryTask(1, num_tokens, num_layers=1, num_heads=32, head_dim=hidden // 32)
        return speed.estimate_s(task.num_questions, task.num_units) - way_s

    assert attention_s(568) < way_s < attention_s(569)
