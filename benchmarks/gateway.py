"""The gateway under load, beside other routers, each in front of workers that compute nothing.

All in one run on one machine: loader, front, control plane and workers share its cores. All systems
run from the start, and take turns in every phase (`benchmarks.gateway_rounds`).

    python -m benchmarks.gateway                     # ours
    python -m benchmarks.gateway --seconds 1 --rounds 1         # a quick look
    python -m benchmarks.gateway --sglang-router-python A/bin/python \
        --vllm-router-python B/bin/python --dynamo-python C/bin/python
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import uvloop
from tokenizers import Tokenizer

from benchmarks.gateway_phases import (
    CAPACITY,
    CROWD_LIMIT_MS,
    CROWD_S,
    SHORT_TOKENS,
    STREAM_TOKENS,
    TTFT_LIMIT_MS,
    Plan,
)
from benchmarks.gateway_rounds import idle_share, measure
from benchmarks.gateway_systems import (
    LOADER_ALONE,
    OURS,
    PLAIN,
    ROLES,
    UNTOLD,
    Load,
    Start,
    System,
    bare_worker,
    dynamo,
    ours,
    router,
)
from benchmarks.gateway_targets import targets_of
from benchmarks.gateway_traffic import NUM_CHATS, mean_tokens
from benchmarks.our_mesh import model_folder
from benchmarks.peer_versions import peer_versions
from benchmarks.result import RESULTS, Row, document, markdown, save
from kvmesh.cli.stack import TRACES_PER_SECOND

_PEERS = ("dynamo", "sglang-router", "vllm-router")

NOTES = (
    "each request has a chat of its own, of 800 to 8,000 characters (a third of that in Chinese"
    " and Japanese): prose, code,"
    " typographic quotes, seven languages; turns of chats: users go on, so most of a chat was sent"
    " before. In a round"
    f" all systems get the same; who answers more than {NUM_CHATS} in a round begins anew\n"
    f"- requests: whole answers of {SHORT_TOKENS} tokens; tokens and first token: streams of"
    f" {STREAM_TOKENS}; workers send token by token, for requests and tokens without a pause\n"
    "- front: the process that clients talk to; all: with scheduler, kvmanager and Redis, without"
    " workers and loader\n"
    f"- ours: telemetry as `kvmesh up` ships it (metrics, logs, traces of {TRACES_PER_SECOND}"
    f" requests in a second), streams journalled; {UNTOLD}: without the former. Workers publish"
    " all prompts' blocks to the kvmanager, and each prompt's prefix is looked up there;"
    f" {ROLES}: one prefill and one decode worker\n"
    "- Dynamo and the routers take turns among workers, and look nothing up; the routers do not"
    " read prompts\n"
    "- tokens/event: of all events, also those without text; ours joins the tokens that a stream"
    " gets while the gateway is behind, the routers pass on their workers' events\n"
    "- workers answer at once; a time to first token has the loader's and the worker's own share in"
    f" it. {LOADER_ALONE}: before one bare worker, with nothing between them; added: less that\n"
    "- all systems take turns in each phase: medians of the rounds, of failed and late the most;"
    " spread: largest less smallest of what the row is for, as a share of the median\n"
    f"- overload: {CAPACITY:g} prompts/s can be taken, offered is a multiple; per s counts first"
    f" tokens within {TTFT_LIMIT_MS} ms; p50 and p99 are of all that were served\n"
    f"- crowd: the same for {CROWD_S:g} s with a limit of {CROWD_LIMIT_MS} ms, each request on a"
    " connection of its own, every tenth for two choices; times count from before it connects\n"
    "- failed: neither a whole answer nor a refusal with 429 or 503"
).split("\n- ")


async def run(starts: Sequence[Start], plan: Plan) -> tuple[list[Row], Mapping[str, float]]:
    """All systems in turn: the rows, and what each takes of a core while it waits."""

    def tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def note(row: Row) -> None:
        tell(", ".join(f"{name} {value}" for name, value in row.items()))

    async with AsyncExitStack() as stack:
        systems: list[System] = []
        for start in starts:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bench-"))
            systems.append(await stack.enter_async_context(start(Path(folder))))
            tell(f"{systems[-1].name} is up")
        idle = await idle_share(systems)
        return await measure(systems, plan, note), idle


def _ours(num_processes: int, tekken: Path | None) -> list[Start]:
    made = partial(ours, tekken=tekken)
    starts = [
        made(),
        made(ROLES, roles=True, loads=PLAIN | {Load.GROWN}),
        made(UNTOLD, told=False, loads=frozenset({Load.TOLD})),
    ]
    if num_processes > 1:
        starts.append(made(f"{OURS} x{num_processes}", num_processes=num_processes))
    return starts


def told_tokens(tekken: Path | None) -> str:
    """How many tokens the chats have, for the notes."""
    with tempfile.TemporaryDirectory() as folder:
        made = Tokenizer.from_file(str(model_folder(Path(folder), tekken) / "tokenizer.json"))
    size, mean = made.get_vocab_size(), mean_tokens(made)
    return (
        f"fronts read a vocabulary of {size:,} tokens, in which a chat has {mean:,.0f} on average"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=1.2, help="length of a phase")
    parser.add_argument("--rounds", type=int, default=3, help="how often all take their turn")
    parser.add_argument("--streams", type=int, default=64, help="at a time, for tokens/s")
    parser.add_argument("--processes", type=int, default=0, help="also ours with so many processes")
    parser.add_argument("--peers-only", action="store_true", help="without ours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tekken",
        type=Path,
        help="large vocabulary of prompts, as people serve them: tekken_240911.json of the package"
        " mistral_common; default: the embedded model's 4,096 tokens",
    )
    for name in _PEERS:
        parser.add_argument(f"--{name}-python", type=Path, help=f"interpreter that has {name}")
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway.json")
    arguments = parser.parse_args(argv)
    plan = Plan(arguments.seconds, arguments.streams, arguments.seed, arguments.rounds)
    pythons = {
        name: python
        for name in _PEERS
        if (python := getattr(arguments, f"{name.replace('-', '_')}_python"))
    }
    peers = peer_versions(pythons)
    starts: list[Start] = (
        [] if arguments.peers_only else _ours(arguments.processes, arguments.tekken)
    )
    for name, python in pythons.items():
        there = python.absolute()
        is_dynamo = name == "dynamo"
        starts.append(dynamo(there, arguments.tekken) if is_dynamo else router(name, there))
    starts.append(bare_worker)
    rows, idle = uvloop.run(run(starts, plan))
    waiting = ", ".join(f"{name} {share:.1%}" for name, share in idle.items())
    notes = [
        *NOTES,
        told_tokens(arguments.tekken),
        f"of a core while they wait for their turn: {waiting}",
    ]
    result = document(rows, targets_of(rows), plan.seed, notes, peers)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
