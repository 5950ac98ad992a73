"""Reads from the gateway's console which workers served each request, and when.

Tests: tests/unit/benchmarks/test_fleet.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.fleet_load import Asked


@dataclass(frozen=True, slots=True)
class Stay:
    """A request at a worker, in seconds on the loop's clock."""

    worker: str
    since: float
    until: float


@dataclass(frozen=True, slots=True)
class Fate:
    """One request.

    Attributes:
        stays: where it was computed; at a decode worker from its acceptance.
        in_vain: workers that lost it, or that did not answer when they were asked to take it.
    """

    stays: Sequence[Stay]
    in_vain: frozenset[str]


def is_met(fate: Fate, worker: str, since: float, until: float) -> bool:
    """Whether a request met a worker that was ill between two times."""
    had_it = any(e.worker == worker and e.since <= until and e.until >= since for e in fate.stays)
    return had_it or worker in fate.in_vain


def fate_of(told: dict[str, Any], offset_s: float) -> Fate:
    """The fate in a timeline of the console.

    Args:
        offset_s: from seconds since 1970 to the loop's clock.
    """
    began = told["at"] + offset_s
    stays = [
        Stay(each["worker"], began + each["start_ms"] / 1e3, began + each["end_ms"] / 1e3)
        for each in told["phases"]
        if each["worker"]
    ]
    if stays and told["decode"]:
        stays.append(Stay(told["decode"], stays[0].since, stays[-1].until))
    in_vain = {
        each["worker"]
        for each in told["events"]
        if each["what"] == "lost" or (each["what"] == "refused" and each["text"].endswith(": lost"))
    }
    return Fate(stays, frozenset(in_vain))


async def fates(console: str, asked: Sequence[Asked]) -> list[Fate]:
    """The fates of requests that are over. The console remembers the last 512.

    Args:
        console: address of the gateway's console.
    """
    offset_s = asyncio.get_running_loop().time() - time.time()
    found = []
    async with aiohttp.ClientSession(f"http://{console}", raise_for_status=True) as session:
        for each in asked:
            name = each.answer.headers["x-request-id"]
            async with session.get(f"/console/requests/{name}") as answer:
                found.append(fate_of(await answer.json(), offset_s))
    return found
