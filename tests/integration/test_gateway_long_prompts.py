"""A prompt may take longer than `limits.prefill_timeout_s` while its worker reports progress."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from kvmesh.core.types import Placement
from services.gateway.request.life import REPORTS
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import TWO_PAIRS, Stack, gateway_stack

SAYS = "a long prompt is computed where it was accepted"
PREFILL_S = 1.0
LONG = 2 * REPORTS
"""Reports of a prompt that takes twice as long as one without any may."""


@pytest.fixture
def timeout_s() -> float:
    """Of a whole request."""
    return 30.0


@pytest.fixture
async def stack(tmp_path: Path, timeout_s: float) -> AsyncIterator[Stack]:
    limits = {"prefill_timeout_s": PREFILL_S, "request_timeout_s": timeout_s}
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits=limits) as stack:
        yield stack
        await stack.idle()


async def ask(stack: Stack) -> str:
    stream = await stack.client.completions.create(
        model=MODEL, prompt="a", stream=True, max_tokens=400
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


def moves(stack: Stack, reason: str) -> float:
    return stack.gateway.metrics.value("kvmesh_gateway_moves_total", reason=reason)


def attempts(stack: Stack) -> dict[str, int]:
    """How many prompts each prefill worker was given."""
    return {name: len(stack.mesh.workers[name].specs) for name in ("p1", "p2")}


@pytest.mark.parametrize("placement", [Placement.AGGREGATED, Placement.DISAGGREGATED])
@pytest.mark.parametrize("starts", [True, False])
async def test_a_worker_that_computes_keeps_its_prompt(
    stack: Stack, placement: Placement, starts: bool
) -> None:
    stack.mesh.placement = placement
    worker = stack.mesh.workers["p1"].does
    worker.prompt_reports, worker.starts = LONG, starts
    began = time.monotonic()
    assert await ask(stack) == SAYS
    assert time.monotonic() - began > 1.5 * PREFILL_S
    assert attempts(stack)["p2"] == 0


async def test_a_worker_that_sends_keeps_its_prompt(stack: Stack) -> None:
    stack.mesh.workers["p1"].does.transfer_reports = LONG
    assert await ask(stack) == SAYS
    assert attempts(stack) == {"p1": 1, "p2": 0}


@pytest.mark.parametrize("placement", [Placement.AGGREGATED, Placement.DISAGGREGATED])
@pytest.mark.parametrize("reports", [0, LONG])
async def test_a_worker_that_stalls_loses_its_prompt(
    stack: Stack, placement: Placement, reports: int
) -> None:
    """Also one of an older version, which does not report."""
    stack.mesh.placement = placement
    worker = stack.mesh.workers["p1"].does
    worker.prompt_reports, worker.stall_prefill = reports, True
    assert await ask(stack) == SAYS
    assert attempts(stack) == {"p1": 1, "p2": 1}
    assert moves(stack, "prefill_stalled") == 1


@pytest.mark.parametrize("timeout_s", [2.5])
async def test_progress_does_not_outlast_the_deadline(stack: Stack) -> None:
    """At its deadline the request ends with one error, and the worker gets a cancel."""
    worker = stack.mesh.workers["p1"]
    worker.does.prompt_reports = -1
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(stack)
    assert caught.value.status_code == 504
    assert 2.0 < time.monotonic() - began < 10.0
    assert attempts(stack) == {"p1": 1, "p2": 0}
    await stack.mesh.until(lambda: set(worker.offers) <= set(worker.cancels))
    worker.does.prompt_reports = 0
