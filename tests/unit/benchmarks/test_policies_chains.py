from __future__ import annotations

from benchmarks.policies_chains import LOADS, prompt_chains


def test_idle_workers_make_first_tokens_sooner_and_cost_no_goodput() -> None:
    """The same numbers on every machine: time is virtual."""
    found = prompt_chains(0.1, seed=1)
    assert len(found.jobs) == 2 * len(LOADS)
    rows = {job.label: job.run().row for job in found.jobs}
    judged = found.judge(rows)
    assert len(judged.targets) == 2 * len(LOADS)
    one, several = rows["load 0.1, one"], rows["load 0.1, several"]
    assert several["TTFT p50"] * 4 < one["TTFT p50"]
    assert several["tokens for others"] > 0 == one["tokens for others"]
