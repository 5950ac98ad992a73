"""Every policy against its baselines, in the simulator: `python -m benchmarks.policies`.

Writes policies.json and policies.md with all runs and targets, and a page with plots for each
experiment. A target that is missed stays in the table with the reason.
Tests: tests/unit/benchmarks/test_policies.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.policies_ablation import ablation, sensitivity
from benchmarks.policies_capacity import capacity
from benchmarks.policies_case_study import case_study
from benchmarks.policies_chains import prompt_chains
from benchmarks.policies_experiments import Experiment, Job, Outcome, experiments
from benchmarks.policies_forwarding import forwarding
from benchmarks.policies_grid import TPOT_MS, Limits, Load, draw, grid, loads
from benchmarks.policies_joint import joint_dispatch
from benchmarks.policies_scale import million, scale
from benchmarks.policies_traces import composition_and_pool
from benchmarks.policies_turns import next_turns
from benchmarks.result import RESULTS, Row, Target, document, markdown, save
from kvmesh.core.cores import usable_cores
from kvmesh.core.errors import KvMeshError
from kvmesh.sim.plots import write_html

SEED = 1

_jobs: list[Job] = []
"""Known to the processes by number, since they are forked after it is filled."""


def _run(number: int) -> Outcome:
    return _jobs[number].run()


def run_all(jobs: Sequence[Job], num_processes: int) -> list[Outcome]:
    """Runs independent jobs in processes, the long ones first; outcomes in order of the jobs."""
    _jobs[:] = jobs
    outcomes: dict[int, Outcome] = {}
    began = time.perf_counter()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        order = sorted(range(len(jobs)), key=lambda number: -jobs[number].weight)
        waiting = {pool.submit(_run, number): number for number in order}
        for done in as_completed(waiting):
            number = waiting[done]
            outcomes[number] = done.result()
            elapsed = time.perf_counter() - began
            name = f"{jobs[number].experiment}: {jobs[number].label}"
            progress = f"[{len(outcomes):3}/{len(jobs)}] {elapsed:5.0f} s  {name}"
            print(f"{progress:100.100}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)
    return [outcomes[number] for number in range(len(jobs))]


def whole_grid(traces: Sequence[Path], size: float, num_seeds: int) -> list[Experiment]:
    """The grid, then what the default consists of: mechanisms and constants."""
    found = loads(traces, size, [SEED + number for number in range(num_seeds)])
    cells = [Limits(tpot_ms) for tpot_ms in TPOT_MS] + [Limits(TPOT_MS[1], 0.2)]
    loose, tight = (Limits(tpot_ms) for tpot_ms in TPOT_MS[::2])
    telling: list[tuple[Load, Limits]] = []
    for trace in dict.fromkeys(each.trace for each in found):
        _, full, over = (each for each in found if each.trace == trace)
        telling += [(full, loose), (full, tight), (over, tight)]
    return [grid(found, cells), ablation(telling), sensitivity(telling)]


def draw_grid(rows: Sequence[Row], out: Path) -> list[str]:
    """Writes the pictures of the grid, if it was run; notes that link them."""
    cells = [row for row in rows if row["experiment"] == "Grid"]
    if not cells:
        return []
    draw(cells, out / "policies_grid.png")
    return ["Grid: [pictures](policies_grid.png)"]


def report(
    found: Sequence[Experiment], outcomes: Sequence[Outcome], out: Path
) -> tuple[list[Row], list[Target], list[str]]:
    """Rows, targets and notes of all experiments; writes the pages."""
    rows: list[Row] = []
    targets: list[Target] = []
    notes: list[str] = []
    at = 0
    for experiment in found:
        done = outcomes[at : at + len(experiment.jobs)]
        at += len(experiment.jobs)
        own = [
            {"experiment": experiment.name, "run": job.label, **outcome.row}
            for job, outcome in zip(experiment.jobs, done, strict=True)
        ]
        rows += own
        by_label = {job.label: each.row for job, each in zip(experiment.jobs, done, strict=True)}
        verdict = experiment.judge(by_label)
        targets += verdict.targets
        notes += [f"{experiment.name}: {note}" for note in verdict.notes]
        series = [each.series for each in done if each.series is not None]
        if series:
            plots = f"policies_{slug(experiment.name)}.html"
            write_html(series, markdown_rows(own), experiment.name, out / plots)
            notes.append(f"{experiment.name}: [plots]({plots})")
    return rows, targets, notes


def slug(name: str) -> str:
    """A name as part of a file's: the same in every run, whatever else runs."""
    return "_".join(re.findall(r"[a-z0-9]+", name.lower()))


def markdown_rows(rows: Sequence[Row]) -> str:
    """The rows of one experiment as text."""
    lines = [" ".join(f"{name}={value}" for name, value in row.items() if name != "experiment")
             for row in rows]  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs all experiments."""
    parser = argparse.ArgumentParser("python -m benchmarks.policies")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="trace files to add")
    parser.add_argument("--size", type=float, default=1.0, help="factor on the requests per run")
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--only", default="", help="experiments whose name contains this")
    parser.add_argument(
        "--grid", action="store_true", help="only the grid of limits, loads and traces"
    )
    parser.add_argument(
        "--ablation", action="store_true", help="only what each mechanism and constant brings there"
    )
    parser.add_argument(
        "--capacity", action="store_true", help="only the sweep of host memory and disk below pools"
    )
    parser.add_argument("--seeds", type=int, default=5, help="of each cell of the grid")
    parser.add_argument(
        "--million", action="store_true", help="only the scale, all million requests of it"
    )
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name, found = _chosen(arguments)
    found = [each for each in found if arguments.only in each.name]
    jobs = [job for experiment in found for job in experiment.jobs]
    outcomes = run_all(jobs, arguments.processes)
    rows, targets, notes = report(found, outcomes, arguments.out)
    if arguments.grid:
        notes += draw_grid(rows, arguments.out)
    result = document(rows, targets, SEED, notes)
    save(result, arguments.out / f"{name}.json")
    print(f"\n{markdown(result)}")
    return 0


def _chosen(arguments: argparse.Namespace) -> tuple[str, list[Experiment]]:
    """The name of the results, and what is to be run."""
    traces, size = arguments.trace, arguments.size
    if arguments.million:
        return "policies_million", [million(SEED)]
    if arguments.capacity:
        return "policies_capacity", capacity(traces, size, SEED)
    if arguments.grid or arguments.ablation:
        cells, *variants = whole_grid(traces, size, arguments.seeds)
        return ("policies_grid", [cells]) if arguments.grid else ("policies_ablation", variants)
    found = [
        forwarding(size, SEED),
        *experiments(size, SEED),
        next_turns(size, SEED),
        case_study(size),
        joint_dispatch(size, SEED),
        prompt_chains(size, SEED),
        scale(size, SEED),
        *composition_and_pool(traces, size, SEED),
    ]
    return "policies", found


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KvMeshError as error:
        sys.exit(f"benchmarks.policies: {error}")
