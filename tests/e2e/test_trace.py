"""One request is one trace: spans of all services under the gateway's, with what happened."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.e2e.api_client import ApiClient, placed
from tests.mesh_processes import BLOCK_SIZE, VOCAB_SIZE, Mesh
from tests.waiting import until

Span = dict[str, Any]
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def spans_of(mesh: Mesh, trace_id: str) -> list[Span]:
    lines = [line for path in mesh.trace_files for line in path.read_text().splitlines()]
    spans: list[Span] = [json.loads(line) for line in lines]
    return [span for span in spans if span["trace_id"] == trace_id]


async def whole_trace(mesh: Mesh, trace_id: str, names: set[str]) -> dict[str, Span]:
    """The trace's spans by name, when all are there."""
    found: dict[str, Span] = {}

    def complete() -> bool:
        found.update({span["name"]: span for span in spans_of(mesh, trace_id)})
        return names <= found.keys()

    await until(complete, f"spans {names}")
    return found


def events(span: Span, name: str) -> list[dict[str, Any]]:
    return [event["attributes"] for event in span["events"] if event["name"] == name]


async def test_the_spans_of_a_disaggregated_request(
    fake_mesh: Mesh, fake_client: ApiClient
) -> None:
    draw = random.Random(1)
    prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(1200)]
    headers = {**placed("disaggregated"), "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    answer = await fake_client.complete(prompt, headers=headers, max_tokens=5)
    assert answer.ok
    names = {
        *("gateway.request", "gateway.route", "gateway.reserve", "gateway.offer"),
        *("gateway.first_token", "gateway.decode"),
        *("scheduler.route", "prefill.request", "decode.request"),
    }
    found = await whole_trace(fake_mesh, TRACE_ID, names)

    by_id = {span["span_id"]: span for span in found.values()}
    parents = {
        name: by_id[span["parent_id"]]["name"]
        for name, span in found.items()
        if span["parent_id"] in by_id
    }
    assert parents == {
        "gateway.route": "gateway.request",
        "gateway.reserve": "gateway.request",
        "gateway.offer": "gateway.request",
        "gateway.first_token": "gateway.request",
        "gateway.decode": "gateway.request",
        "scheduler.route": "gateway.route",
        "decode.request": "gateway.reserve",
        "prefill.request": "gateway.offer",
    }
    assert found["gateway.request"]["parent_id"] == "00f067aa0ba902b7"
    services = {span["service"] for span in found.values()}
    assert services == {"gateway", "scheduler", "prefill", "decode"}

    route = found["scheduler.route"]["attributes"]
    assert route["outcome"] == "plan"
    assert route["cache_known"] is True
    assert answer.prefill_worker in route["reason"]
    assert found["gateway.reserve"]["attributes"]["worker"] == answer.decode_worker
    assert found["gateway.offer"]["attributes"]["worker"] == answer.prefill_worker

    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    prefill = found["prefill.request"]
    assert prefill["attributes"]["outcome"] == "handed_off"
    assert prefill["attributes"]["transfer_bytes"] == num_blocks * BLOCK_SIZE * 8
    assert prefill["attributes"]["transfer_calls"] >= 1
    chunks = [chunk["computed_tokens"] for chunk in events(prefill, "chunk")]
    assert chunks, "1200 tokens take several steps"
    assert chunks == sorted(set(chunks))
    assert len(events(prefill, "first_token")) == 1

    decode = found["decode.request"]
    assert [event["name"] for event in decode["events"]] == [
        *("reserved", "committed", "first_decode"),
    ]
    assert decode["attributes"]["outcome"] == "length"
    assert decode["attributes"]["generated_tokens"] == 5
    for span in found.values():
        assert span["start_ns"] <= span["end_ns"]
