"""Reads request traces published as CSV, with arrival times and lengths but without prompts.

| trace | columns |
|---|---|
| Azure LLM inference 2023 and 2024 | `TIMESTAMP`, `ContextTokens`, `GeneratedTokens` |
| BurstGPT | `Timestamp` (seconds), `Request tokens`, `Response tokens`; others are ignored |

The traces do not say which prompts share a prefix, so every block is unique here. Rows without
prompt or answer tokens are requests that failed during the recording; they are skipped.
Tests: tests/unit/sim/test_csv_trace.py.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from kvmesh.core.errors import ConfigError
from kvmesh.sim.trace_request import TraceRequest, num_blocks


@dataclass(frozen=True, slots=True)
class _Columns:
    """Column names of a published trace.

    Attributes:
        seconds: parses the text of an arrival time.
    """

    arrival: str
    input_tokens: str
    output_tokens: str
    seconds: Callable[[str], float]


def _since_epoch(text: str) -> float:
    """Returns the epoch seconds of a date with up to seven decimals; without a zone it is UTC."""
    day, _, fraction = text.partition(".")
    digits = "".join(itertools.takewhile(str.isdigit, fraction))
    moment = datetime.fromisoformat(day + fraction[len(digits) :])
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + float(f"0.{digits or 0}")


_KNOWN = (
    _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _since_epoch),
    _Columns("Timestamp", "Request tokens", "Response tokens", float),
)


def read_csv(lines: Iterable[str], where: str) -> Iterator[TraceRequest]:
    """Yields the requests of a trace in the order of its rows, with the file's arrival times.

    Args:
        where: name of the file, for messages.

    Raises:
        ConfigError: the columns are those of no known trace, or a row is wrong.
    """
    rows = csv.DictReader(lines)
    names = rows.fieldnames or ()
    columns = next((each for each in _KNOWN if _names(each) <= set(names)), None)
    if columns is None:
        known = "; ".join(", ".join(sorted(_names(each))) for each in _KNOWN)
        raise ConfigError(
            f"{where}:1: columns {', '.join(names)} are those of no known trace; known are {known}"
        )
    next_id = itertools.count()
    for row in rows:
        place = f"{where}:{rows.line_num}"
        at_s = _arrival(row, columns, place)
        tokens = _count(row, columns.input_tokens, place)
        output_tokens = _count(row, columns.output_tokens, place)
        if tokens and output_tokens:
            ids = tuple(itertools.islice(next_id, num_blocks(tokens)))
            yield TraceRequest(at_s, tokens, output_tokens, ids)


def _names(columns: _Columns) -> set[str]:
    return {columns.arrival, columns.input_tokens, columns.output_tokens}


def _arrival(row: Mapping[str, str | None], columns: _Columns, place: str) -> float:
    text = row[columns.arrival] or ""
    try:
        seconds = columns.seconds(text)
    except ValueError as error:
        raise ConfigError(f"{place}: {columns.arrival} {text!r} is not a time") from error
    if not math.isfinite(seconds):
        raise ConfigError(f"{place}: {columns.arrival} {text!r} is not a time")
    return seconds


def _count(row: Mapping[str, str | None], name: str, place: str) -> int:
    text = row[name] or ""
    try:
        number = float(text)  # some releases have decimals
    except ValueError:
        number = -1.0
    if number < 0 or not number.is_integer():
        raise ConfigError(f"{place}: {name} {text!r} is not a number of tokens")
    return int(number)
