"""Request traces: who arrives when, how long, and which prefixes are shared.

One JSON object per line, gzip or plain: `t_ms`, `input_len`, `output_len`, `hash_ids` (one chained
id per block of 512 prompt tokens), and for sessions `session`, `turn`, `think_ms`; a `scenario`
where groups serve one each. Mooncake's published traces name the first three otherwise; both are
read.
Tests: tests/unit/sim/test_trace.py.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmesh.core.errors import ConfigError
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.fields import Fields

TRACE_BLOCK = 512
"""Prompt tokens per hash id."""

_MOONCAKE = {"timestamp": "t_ms", "input_length": "input_len", "output_length": "output_len"}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival_s: from the start.
        hash_ids: equal id means equal block and equal prefix; the last one may be partial.
        session: empty if the request stands alone.
        scenario: whose request it is, where that matters.
        think_s: pause of the client after the answer before, for closed-loop replay.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    session: str = ""
    turn: int = 0
    think_s: float = 0.0
    scenario: str = ""

    @property
    def full_ids(self) -> tuple[int, ...]:
        """Ids of full blocks; only these can be shared."""
        return self.hash_ids[: self.input_tokens // TRACE_BLOCK]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Reads a trace, ordered by arrival.

    Args:
        limit: read only so many lines.

    Raises:
        ConfigError: the file cannot be read or a line is wrong.
    """
    requests: list[TraceRequest] = []
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and number > limit:
                    break
                requests.append(_parse(line, f"{path}:{number}"))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:  # cut off, or no text
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if not requests:
        raise ConfigError(f"{path}: no request")
    return sorted(requests, key=lambda request: request.arrival_s)


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
    if len(ids) != -(-tokens // TRACE_BLOCK) or not all(isinstance(each, int) for each in ids):
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
    """Each request with the leading blocks that an endless cache would hold by then."""
    seen: set[int] = set()
    for request in requests:
        hits = next(
            (index for index, each in enumerate(request.hash_ids) if each not in seen),
            len(request.hash_ids),
        )
        seen.update(request.hash_ids)
        yield request, hits


def uncached_lengths(requests: Iterable[TraceRequest]) -> LengthDistribution:
    """Tokens left to compute with an endless cache: what the threshold search needs."""
    return LengthDistribution(
        max(request.input_tokens - hits * TRACE_BLOCK, 1)
        for request, hits in matched_blocks(requests)
    )
