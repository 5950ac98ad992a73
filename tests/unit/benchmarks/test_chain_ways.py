from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chain_ways import CASES, SAME, alone, asked, carried, compared, shapes

MANY, GROUPED, SLOW, ONE = shapes()


def test_every_case_is_a_row_and_queries_bring_no_token_sooner() -> None:
    rows, targets = compared()
    assert len(rows) == sum(len(lengths) * len(links) for lengths, links in CASES.values())
    assert all(each.met for each in targets)
    for shape in shapes():
        _, links = CASES[shape.name]
        for tokens in (4096, 16_384, 65_536):
            for step in range(1, 40):
                times = tokens, step / 20 * links[3]
                assert carried(shape, *times).first <= SAME * asked(shape, *times).first


def test_over_a_wide_link_both_ways_take_half_the_time() -> None:
    queries = asked(MANY, 32_768, 400, least=True)
    for times in (carried(MANY, 32_768, 400), queries):
        assert times.first == times.second
        assert alone(MANY, 32_768, 400).first / times.first == pytest.approx(1.94, abs=0.05)


def test_many_heads_over_a_thin_link_would_be_sooner_if_questions_cost_only_bytes() -> None:
    kv, least = carried(MANY, 32_768, 25), asked(MANY, 32_768, 25, least=True)
    assert least.first < 0.8 * kv.first
    assert least.second == pytest.approx(kv.second, rel=0.01), "the handoff takes longer"
    assert asked(MANY, 32_768, 25).first >= kv.first
    fewer = replace(MANY, num_kv_heads=8)
    thin = 25 / 4
    assert asked(fewer, 32_768, thin, least=True).first > carried(fewer, 32_768, thin).first


def test_bytes_are_those_of_the_heads() -> None:
    assert MANY.kv_bytes == 512 << 10
    assert (MANY.query_bytes, GROUPED.kv_bytes) == (256 << 10, 128 << 10)
    assert (SLOW.kv_bytes, ONE.kv_bytes) == (MANY.kv_bytes, 12_288)
