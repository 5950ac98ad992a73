"""`kvmesh profile`: measures a model on this machine and writes the profile for plans and
simulations.

Tests: tests/integration/test_profile_command.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmesh.cli.link_speed import loopback_bytes_per_s, read_bytes_per_s
from kvmesh.cli.model_folder import read_model_folder
from kvmesh.cli.profile_flags import parser
from kvmesh.cli.stack_costs import measure_stack, stack_record
from kvmesh.core.errors import ConfigError
from kvmesh.engine.measure import blocks_of, decode_seconds, handoff_bytes, prefill_seconds
from kvmesh.engine.protocol import ModelRunner
from kvmesh.engine.runner import TorchRunner
from kvmesh.sim.cost_fit import COVERAGE, DecodeSample, Fit, PrefillSample
from kvmesh.sim.profile_record import Measured, plot_profile, profile_record

_TERMS = 3
_UNQUIET = 0.5
"""Relative prediction error from which on a profile is useless for planning."""


def main(argv: Sequence[str]) -> int:
    """Measures a model, fits the costs and writes the profile."""
    arguments = parser().parse_args(argv)
    if not arguments.model:
        raise ConfigError("name a model folder with --model")
    read_model_folder(Path(arguments.model), has_text=False)
    _check_samples("--lengths and --cached", arguments.lengths, arguments.cached)
    _check_samples("--batches and --contexts", arguments.batches, arguments.contexts)
    runner = TorchRunner.load(
        Path(arguments.model),
        served_name=Path(arguments.model).name,
        device=arguments.device,
        dtype=arguments.dtype,
        num_blocks=arguments.num_blocks,
        block_size=arguments.block_size,
        num_threads=arguments.threads,
    )
    console = Console(stderr=True)
    if arguments.url:
        record = _stack_record(runner, arguments)
        Path(arguments.out).write_text(json.dumps(record, indent=2) + "\n")
        Console().print(f"wrote {arguments.out}", soft_wrap=True)
        return 0
    if arguments.cuda_graphs == "on" or (
        arguments.cuda_graphs == "auto" and arguments.device != "cpu"
    ):
        console.print("capturing decode steps", soft_wrap=True)
        runner.use_static_steps(max(arguments.batches))
    try:
        measured = _measure(runner, arguments, console)
    finally:
        runner.close()
    try:
        record = profile_record(measured)
    except ValueError as error:
        raise ConfigError(f"{error}; name more lengths, batches or contexts") from error
    Path(arguments.out).write_text(json.dumps(record, indent=2) + "\n")
    if arguments.plot:
        plot_profile(measured, Path(arguments.plot))
    _summarize(record["measured"], arguments.out)
    return 0


def _stack_record(runner: ModelRunner, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures a running stack; the model itself tells only the size of its KV."""
    spec, positions = runner.spec, runner.spec.layout.block_size * runner.kv.num_blocks
    try:
        lengths = {1, min(spec.max_model_len, positions)}
        kv_bytes = _kv_bytes(runner, lengths)["total"]
    finally:
        runner.close()
    measured = asyncio.run(measure_stack(arguments.url.rstrip("/")))
    return stack_record(measured, spec.name, kv_bytes, positions)


def _check_samples(names: str, some: Sequence[int], others: Sequence[int]) -> None:
    """Checks before the measurement that there are enough samples: three terms need three."""
    number = len(set(some)) * len(set(others))
    if number < _TERMS:
        raise ConfigError(f"{names} make {number} samples, the fit needs {_TERMS}; name more")


def _measure(runner: ModelRunner, arguments: argparse.Namespace, console: Console) -> Measured:
    spec, repeats, budget = runner.spec, arguments.repeats, arguments.max_batch_tokens
    longest = min(spec.max_model_len, spec.layout.block_size * runner.kv.num_blocks)
    prompts = [
        (tokens, cached)
        for cached in arguments.cached
        for tokens in arguments.lengths
        if tokens > 0 and _fits(runner, 1, tokens + cached)
    ]
    steps = [
        (batch, context)
        for context in arguments.contexts
        for batch in arguments.batches
        if batch > 0 and context > 1 and _fits(runner, batch, context)
    ]
    if not prompts or not steps:
        raise ConfigError(
            f"no length fits a context of {longest} and {runner.kv.num_blocks} blocks"
        )
    prompt_runs: dict[tuple[int, int], list[float]] = {each: [] for each in prompts}
    step_runs: dict[tuple[int, int], list[float]] = {each: [] for each in steps}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    total = repeats * (len(prompts) + len(steps)) + 2
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("warm up", total=total)
        for _ in range(2):
            prefill_seconds(runner, prompts[0][0], 0, budget)
        # Rounds over all points, so that the runs of one point include the machine's drift.
        for turn in range(repeats):
            for tokens, cached in prompts:
                progress.update(bar, description=f"prefill {tokens} after {cached}", advance=1)
                seconds = prefill_seconds(runner, tokens, cached, budget, fills=not turn)
                prompt_runs[tokens, cached].append(seconds)
            for batch, context in steps:
                progress.update(bar, description=f"decode {batch} x {context}", advance=1)
                seconds = decode_seconds(runner, batch, context, budget, fills=not turn)
                step_runs[batch, context].append(seconds)
        progress.update(bar, description="memory and loopback")
        memory = read_bytes_per_s()
        progress.advance(bar)
        link = loopback_bytes_per_s()
        progress.update(bar, description="done", completed=total)
    return Measured(
        model=spec.name,
        device=arguments.device.split(":")[0],
        prefill=tuple(
            PrefillSample(*point, statistics.median(runs), tuple(runs))
            for point, runs in prompt_runs.items()
        ),
        decode=tuple(
            DecodeSample(*point, statistics.median(runs), tuple(runs))
            for point, runs in step_runs.items()
        ),
        kv_bytes=_kv_bytes(runner, {1, longest} | {sum(each) for each in prompts}),
        kv_tokens=longest,
        link_bytes_per_s=link,
        memory_bytes_per_s=memory,
    )


def _kv_bytes(runner: ModelRunner, lengths: set[int]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for tokens in sorted(lengths):
        for name, size in handoff_bytes(runner, tokens).items():
            found.setdefault(name, []).append((tokens, size))
    return found


def _fits(runner: ModelRunner, batch: int, length: int) -> bool:
    fits_context = length <= runner.spec.max_model_len
    return fits_context and batch * blocks_of(runner, length) <= runner.kv.num_blocks


def warning_of(fit: Fit) -> str:
    """Returns advice for a fit with a large prediction error; empty if the error is small."""
    if fit.prediction_error is None or fit.prediction_error < _UNQUIET:
        return ""
    return "too far off to plan with; was the machine busy? measure again on a quiet one"


def _summarize(measured: dict[str, object], out: str) -> None:
    console = Console()
    for name, terms in (
        ("prefill", ("s", "s per token", "s per token²")),
        ("decode", ("s", "s per sequence", "s per token of context")),
    ):
        raw = measured[f"{name}_fit"]
        assert isinstance(raw, dict)
        fit = Fit(**raw)
        parts = [
            f"{value:.3g} ± {error:.1g} {unit}"
            for value, error, unit in zip(fit.coefficients, fit.errors, terms, strict=True)
        ]
        fresh = "not known, a point more tells"
        if fit.prediction_error is not None:
            fresh = f"within {fit.prediction_error:.1%} in {COVERAGE:.0%} of cases"
        console.print(
            f"{name}: {', '.join(parts)}; fit off by {fit.relative_error:.1%}; a fresh run {fresh}",
            soft_wrap=True,
        )
        if warning := warning_of(fit):
            console.print(f"{name}: {warning}", style="yellow", soft_wrap=True)
    memory, link = measured["memory_gb_per_s"], measured["link_gb_per_s"]
    console.print(
        f"memory {memory:.1f} GB/s, loopback {link:.1f} GB/s; wrote {out}", soft_wrap=True
    )
