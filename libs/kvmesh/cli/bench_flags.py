"""Flags of `kvmesh bench`. Tests: tests/unit/cli/test_bench.py."""

from __future__ import annotations

import argparse

from kvmesh.cli.flags import add_flag, add_list, count, new_parser, not_negative, positive_int
from kvmesh.cli.https import add_ca_flag
from kvmesh.cli.stack_state import add_state_flag, add_url_flag


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all flags."""
    made = new_parser(
        "kvmesh bench",
        "Measures a running stack: streams completions at a Poisson rate and reports TTFT, TPOT,\n"
        "ITL, end-to-end latency, throughput and goodput.",
        "If the gateway requires a key, set it in KVMESH_API_KEY.\n\n"
        "example:\n  kvmesh bench serve --requests 200 --rate 4 --goodput ttft:2000 tpot:100",
    )
    made.add_argument("what", choices=("serve",), help="what to measure: serve")
    add_url_flag(made)
    add_ca_flag(made)
    add_state_flag(made)
    add_flag(made, "--model-name", "", "model name; default: the first served model")
    add_flag(made, "--requests", 200, "number of requests", kind=positive_int)
    add_flag(
        made,
        "--rate",
        4.0,
        "requests per second (Poisson arrivals); 0: all at once",
        kind=not_negative,
    )
    add_flag(made, "--concurrency", 0, "maximum requests in flight; 0: no limit", kind=count)
    add_flag(made, "--input-tokens", 256, "prompt length in tokens", kind=positive_int)
    add_flag(made, "--output-tokens", 64, "answer length in tokens", kind=positive_int)
    add_flag(
        made,
        "--prompts",
        "tokens",
        "content of prompts: random token ids or text",
        choices=("tokens", "text"),
    )
    add_flag(made, "--vocab-size", 4000, "upper bound of the random token ids", kind=positive_int)
    add_flag(made, "--temperature", 0.0, "sampling temperature; 0: greedy", kind=not_negative)
    add_flag(made, "--warmup", 1, "warm-up requests, which are not counted", kind=count)
    add_flag(made, "--seed", 0, "random seed; equal seeds send equal requests", kind=int)
    add_list(
        made,
        "--goodput",
        "limits in ms that a request must meet to count as goodput, such as ttft:2000 tpot:100",
        "NAME:MS",
    )
    add_flag(
        made,
        "--save",
        "",
        "file for the results as JSON; a Markdown file is written beside it",
        metavar="FILE",
    )
    return made
