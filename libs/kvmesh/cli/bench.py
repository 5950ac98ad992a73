"""`kvmesh bench serve`: measures a running stack under a load like users' requests.

Tests: tests/unit/cli/test_bench.py.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmesh.cli import bench_report
from kvmesh.cli.bench_flags import parser
from kvmesh.cli.bench_load import Load, LoadGenerator, find_model
from kvmesh.cli.bench_metrics import RequestRecord, parse_goodput, summarize, targets
from kvmesh.cli.stack_state import CHECKOUT, gateway_url
from kvmesh.core.config import environment


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns exit code 0 if all requests were answered or refused, else 1."""
    flags = parser()
    arguments = flags.parse_args(argv)
    try:
        limits = parse_goodput(arguments.goodput)
    except ValueError as error:
        flags.error(f"--goodput: {error}")
    console = Console()
    result, failures = asyncio.run(_measure(arguments, limits, console))
    for line in bench_report.summary_lines(result):
        console.print(line, highlight=False)
    console.print(bench_report.latency_table(result))
    for reason, number in failures.most_common(5):
        print(f"{number} x {reason}", file=sys.stderr)
    if arguments.save:
        bench_report.write_result(result, bench_report.markdown(result), Path(arguments.save))
        console.print(f"saved to {arguments.save}", highlight=False)
    return 0 if all(target["met"] for target in result["targets"][:2]) else 1


async def _measure(
    arguments: argparse.Namespace, limits: dict[str, float], console: Console
) -> tuple[dict[str, Any], Counter[str]]:
    url = gateway_url(arguments)
    api_key = environment("KVMESH_API_KEY")  # no flag: results keep the command line
    load = Load(
        url=url,
        model=arguments.model_name or await find_model(url, api_key, arguments.tls_ca),
        num_requests=arguments.requests,
        rate=arguments.rate,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        seed=arguments.seed,
        prompts=arguments.prompts,
        vocab_size=arguments.vocab_size,
        concurrency=arguments.concurrency,
        temperature=arguments.temperature,
        api_key=api_key,
        tls_ca=arguments.tls_ca,
    )
    if arguments.warmup:
        # Another seed, so that the run's prompts are not in the prefix cache when it begins.
        warmup = replace(load, num_requests=arguments.warmup, seed=arguments.seed + 1, rate=0.0)
        await LoadGenerator(warmup, lambda _: None).run()
    records, duration_s = await _with_progress(load, console)
    failures = Counter(record.error for record in records if record.error)
    result = summarize(records, duration_s, limits)
    return _document(load, arguments.seed, limits, result), failures


async def _with_progress(load: Load, console: Console) -> tuple[list[RequestRecord], float]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    seen: Counter[str] = Counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("requests", total=load.num_requests)

        def note(record: RequestRecord) -> None:
            seen[record.outcome] += 1
            progress.update(
                bar,
                advance=1,
                description=f"requests ({seen['refused']} refused, {seen['error']} errors)",
            )

        return await LoadGenerator(load, note).run()


def _document(
    load: Load, seed: int, limits: dict[str, float], result: dict[str, float]
) -> dict[str, Any]:
    """Returns the result with all data needed to judge and repeat it."""
    return {
        "command": bench_report.command_line(["python", "-m", "kvmesh.cli"], sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": bench_report.git_commit(CHECKOUT),
        "machine": bench_report.machine(),
        "versions": bench_report.versions(),
        "model": load.model,
        "num_requests": load.num_requests,
        "request_rate": load.rate,
        "max_concurrency": load.concurrency,
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "seed": seed,
        "goodput_limits": limits,
        **result,
        "rows": bench_report.latency_rows(result),
        "targets": targets(result, load.num_requests, limits),
    }
