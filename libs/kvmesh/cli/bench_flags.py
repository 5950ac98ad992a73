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
        "A gateway that asks for keys gets the one in KVMESH_API_KEY.\n\n"
        "example:\n  kvmesh bench serve --requests 200 --rate 4 --goodput ttft:2000 tpot:100",
    )
    made.add_argument("what", choices=("serve",), help="what to measure")
    add_url_flag(made)
    add_ca_flag(made)
    add_state_flag(made)
    add_flag(made, "--model-name", "", "model to ask; default: the first that is served")
    add_flag(made, "--requests", 200, "requests to send", kind=positive_int)
    add_flag(made, "--rate", 4.0, "requests per second; 0: all at once", kind=not_negative)
    add_flag(made, "--concurrency", 0, "most in flight; 0: no limit", kind=count)
    add_flag(made, "--input-tokens", 256, "tokens per prompt", kind=positive_int)
    add_flag(made, "--output-tokens", 64, "tokens to generate", kind=positive_int)
    add_flag(made, "--prompts", "tokens", "random token ids or text", choices=("tokens", "text"))
    add_flag(made, "--vocab-size", 4000, "token ids stay below", kind=positive_int)
    add_flag(made, "--temperature", 0.0, "0 is greedy", kind=not_negative)
    add_flag(made, "--warmup", 1, "requests before, not counted", kind=count)
    add_flag(made, "--seed", 0, "the same seed sends the same requests", kind=int)
    add_list(made, "--goodput", "limits in ms, such as ttft:2000 tpot:100", "NAME:MS")
    add_flag(
        made,
        "--save",
        "",
        "write JSON here, and Markdown beside it",
        metavar="FILE",
    )
    return made
