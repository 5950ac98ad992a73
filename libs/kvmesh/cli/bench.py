"""`kvmesh bench serve`: load on a running stack, as a user would send it.

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
from kvmesh.cli.bench_load import Load, LoadGenerator, find_model
from kvmesh.cli.bench_metrics import RequestRecord, parse_goodput, summarize, targets
from kvmesh.cli.flags import add_flag, add_list, count, new_parser, not_negative, positive_int
from kvmesh.cli.https import add_ca_flag
from kvmesh.cli.stack_state import CHECKOUT, add_state_flag, add_url_flag, gateway_url
from kvmesh.core.config import environment


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "kvmesh bench",
        "Measures a running stack: streams completions at a Poisson rate and reports TTFT, TPOT,\n"
        "ITL, end-to-end latency, throughput and goodput.",
        "A gateway that asks for keys gets the one in KVMESH_API_KEY.\n\n"
        "example:\n  kvmesh bench serve --requests 200 --rate 4 --goodput ttft:2000 tpot:100",
    )
    parser.add_argument("what", choices=("serve",), help="what to measure")
    add_url_flag(parser)
    add_ca_flag(parser)
    add_state_flag(parser)
    add_flag(parser, "--model-name", "", "model to ask; default: the first that is served")
    add_flag(parser, "--requests", 200, "requests to send", kind=positive_int)
    add_flag(parser, "--rate", 4.0, "requests per second; 0: all at once", kind=not_negative)
    add_flag(parser, "--concurrency", 0, "most in flight; 0: no limit", kind=count)
    add_flag(parser, "--input-tokens", 256, "tokens per prompt", kind=positive_int)
    add_flag(parser, "--output-tokens", 64, "tokens to generate", kind=positive_int)
    add_flag(parser, "--prompts", "tokens", "random token ids or text", choices=("tokens", "text"))
    add_flag(parser, "--vocab-size", 4000, "token ids stay below", kind=positive_int)
    add_flag(parser, "--temperature", 0.0, "0 is greedy", kind=not_negative)
    add_flag(parser, "--warmup", 1, "requests before, not counted", kind=count)
    add_flag(parser, "--seed", 0, "the same seed sends the same requests", kind=int)
    add_list(parser, "--goodput", "limits in ms, such as ttft:2000 tpot:100", "NAME:MS")
    add_flag(
        parser,
        "--save",
        "",
        "write JSON here, and Markdown beside it",
        metavar="FILE",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 0 if every request was answered or refused, 1 if any failed."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        limits = parse_goodput(arguments.goodput)
    except ValueError as error:
        parser.error(f"--goodput: {error}")
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
        # Another seed: its prompts must not be in the prefix cache when the run begins.
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
    """The result with all that is needed to judge and repeat it."""
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
