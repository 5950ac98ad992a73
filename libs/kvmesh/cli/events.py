"""`kvmesh events`: shows the KV events of a `vllm serve` or of a worker.

Tests: tests/integration/test_kv_event_reader.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from kvmesh.cli.flags import add_flag, add_switch, new_parser, not_negative
from kvmesh.runtime.kv_event_reader import HeldBlocks, KvEventReader, ReadBatch

_LINE_S = 1.0

_EPILOG = """\
Blocks in each medium, and how many were stored and removed. Works with `vllm serve
--kv-events-config ...` and with workers (--events.endpoint), which publish in the same format.

examples:
  kvmesh events tcp://127.0.0.1:5557
  kvmesh events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558   # from the oldest batch on
  kvmesh events tcp://127.0.0.1:5557 --json > events.jsonl           # every event, with tokens

exit code: 0; 1 if a message is none of KV events, or nobody answers at --replay; 2 wrong usage
"""


def main(argv: Sequence[str]) -> int:
    """Shows events until Ctrl-C, or for some seconds."""
    parser = new_parser("kvmesh events", "Shows KV events live. Ctrl-C exits.", _EPILOG)
    parser.add_argument(
        "endpoint", metavar="tcp://HOST:PORT", help="where the events are published"
    )
    add_flag(
        parser,
        "--replay",
        "",
        "where missed batches are given again; without it, what came before is not known",
        metavar="tcp://HOST:PORT",
    )
    add_flag(parser, "--topic", "", "read only topics that begin so")
    add_flag(
        parser, "--seconds", 0.0, "end after so many seconds; 0: with Ctrl-C", kind=not_negative
    )
    add_switch(parser, "--json", "print each event as JSON, one per line")
    arguments = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(
            _follow(
                (arguments.endpoint, arguments.replay, arguments.topic),
                arguments.seconds,
                as_json=arguments.json,
            )
        )
    return 0


async def _follow(where: tuple[str, str, str], seconds: float, *, as_json: bool) -> None:
    reader, held = KvEventReader(*where), HeldBlocks()
    telling = asyncio.create_task(_tell(held)) if not as_json else None
    try:
        async with asyncio.timeout(seconds or None):
            async for batch in reader.batches():
                held.apply(batch)
                if as_json:
                    for line in lines_of(batch):
                        sys.stdout.write(json.dumps(line) + "\n")
                    sys.stdout.flush()
    except TimeoutError:
        pass
    finally:
        reader.close()
        if telling is not None:
            telling.cancel()
            print(line_of(held, HeldBlocks()))


async def _tell(held: HeldBlocks) -> None:
    while True:
        before = replace(held)
        await asyncio.sleep(_LINE_S)
        print(f"{time.strftime('%H:%M:%S')}  {line_of(held, before)}", flush=True)


def line_of(held: HeldBlocks, before: HeldBlocks) -> str:
    """Returns a line: blocks in each medium, and those stored and removed since `before`."""
    if not held.num_batches:
        return "no batch has come: is that where events are published, and does it serve requests?"
    media = ", ".join(f"{medium or 'no medium'} {count}" for medium, count in held.media.items())
    parts = [
        f"{sum(held.media.values())} blocks ({media})" if media else "0 blocks",
        f"{held.num_stored - before.num_stored} stored",
        f"{held.num_removed - before.num_removed} removed",
    ]
    named = {name: count for name, count in held.adapters.items() if name}
    parts += [f"adapter {name} {count}" for name, count in sorted(named.items())]
    if held.num_missed:
        parts.append(f"{held.num_missed} batches missed: the numbers may be wrong")
    if held.num_unknown:
        parts.append(f"{held.num_unknown} events of unknown kinds")
    return ", ".join(parts)


def lines_of(batch: ReadBatch) -> list[Mapping[str, Any]]:
    """The events of a batch as JSON has them; hashes of bytes as hex."""
    head = {"batch": batch.number, "time": batch.unix_s, "missed": batch.num_missed}
    return [
        {**head, "event": type(event).__name__.lower(), **_plain(asdict(event))}
        for event in batch.events
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
