"""Reads request traces: arrival times, lengths and shared prefixes.

`csv_trace` reads published CSV files. All other files have one JSON object per line, gzip or plain:
`t_ms`, `input_len`, `output_len`, `hash_ids` (one chained id per block of 512 tokens). Sessions
also have `session`, `turn` and `think_ms`; requests of a group's scenario have `scenario`.
Mooncake's names of the first three are read too.
Tests: tests/unit/sim/test_trace.py.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from kvmesh.core.errors import ConfigError
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.csv_trace import read_csv
from kvmesh.sim.fields import Fields
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest, num_blocks

_MOONCAKE = {"timestamp": "t_ms", "input_length": "input_len", "output_length": "output_len"}


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Reads a trace, ordered by arrival.

    Args:
        limit: maximum number of requests to read; None: all.

    Raises:
        ConfigError: the file cannot be read or a line is wrong.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(
            path, "rt", encoding="utf-8-sig"
        ) as file:
            first = file.readline()
            lines = itertools.chain([first] if first else [], file)
            is_json = first.lstrip().startswith(("{", "[")) or not first
            read = _read_json if is_json else read_csv
            requests = list(itertools.islice(read(lines, str(path)), limit))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:  # cut off, or no text
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if not requests:
        raise ConfigError(f"{path}: no request")
    requests.sort(key=lambda request: request.arrival_s)
    if is_json:
        return requests
    # CSV traces have dates, or seconds since their own start.
    start_s = requests[0].arrival_s
    return [replace(each, arrival_s=each.arrival_s - start_s) for each in requests]


def _read_json(lines: Iterable[str], where: str) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        yield _parse(line, f"{where}:{number}")


def _parse(line: str, where: str) -> TraceRequest:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: not an object")
    fields = Fields({_our_name(key): value for key, value in data.items()}, where)
    ids = fields.array("hash_ids")
    tokens = fields.count("input_len", 1)
    if len(ids) != num_blocks(tokens) or not all(isinstance(each, int) for each in ids):
        raise ConfigError(f"{where}: {len(ids)} hash_ids for {tokens} tokens")
    return TraceRequest(
        arrival_s=fields.number("t_ms") / 1000,
        input_tokens=tokens,
        output_tokens=fields.count("output_len", 1),
        hash_ids=tuple(ids),
        session=fields.text("session") if fields.has("session") else "",
        turn=fields.count("turn") if fields.has("turn") else 0,
        think_s=fields.number("think_ms") / 1000 if fields.has("think_ms") else 0.0,
        scenario=fields.text("scenario") if fields.has("scenario") else "",
    )


def _our_name(key: str) -> str:
    return _MOONCAKE.get(key, key)


def matched_blocks(requests: Iterable[TraceRequest]) -> Iterator[tuple[TraceRequest, int]]:
    """Yields each request with the number of leading blocks that an infinite cache would hold."""
    seen: set[int] = set()
    for request in requests:
        hits = next(
            (index for index, each in enumerate(request.hash_ids) if each not in seen),
            len(request.hash_ids),
        )
        seen.update(request.hash_ids)
        yield request, hits


def uncached_lengths(requests: Iterable[TraceRequest]) -> LengthDistribution:
    """Returns the distribution of uncached lengths with an infinite cache, for the search."""
    return LengthDistribution(
        max(request.input_tokens - hits * TRACE_BLOCK, 1)
        for request, hits in matched_blocks(requests)
    )
