from __future__ import annotations

from benchmarks.policies_joint import LOADS, TOGETHER, joint_dispatch


def test_less_kv_moves_where_requests_come_at_once() -> None:
    """The same numbers on every machine: time is virtual."""
    found = joint_dispatch(0.1, seed=1)
    assert len(found.jobs) == len(LOADS) * (1 + len(TOGETHER))
    jobs = {job.label: job for job in found.jobs}
    alone, together = (jobs[f"4/s at once {each}"].run().row for each in ("kvmesh", "joint"))
    assert together["moved tokens"] < alone["moved tokens"]
    assert together["elsewhere"] > 0 == alone["elsewhere"]
    assert together["goodput/s"] >= 0.99 * alone["goodput/s"]
    judged = found.judge(dict.fromkeys(jobs, together))
    assert len(judged.targets) == 10
