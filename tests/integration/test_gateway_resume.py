"""A stream goes on at another gateway behind what its client has: the same events, each once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import aiohttp
import pytest

from kvmesh.metadata.server_binary import RedisProcess
from services.gateway.config import AccessConfig, ResumeConfig, SharedRedisConfig
from services.gateway.request import journal
from services.gateway.request.event_ids import parse_id
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack
from tests.integration.test_gateway_api import CALL, HELLO, WEATHER
from tests.integration.test_gateway_reasoning import TEMPLATE
from tests.redis_server import redis_process

SAYS = "one request, one reservation, one handoff; no token is lost or repeated: 🙂 ü"
CHAT = {"model": MODEL, "messages": HELLO, "stream": True}
TEXT = {"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 200}
USAGE = {"stream_options": {"include_usage": True}}
COUNTS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Event(NamedTuple):
    """One server-sent event; without an id of its own it has that of the one before."""

    last_id: str
    data: str


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[Stack, Stack]]:
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis) as both:
            yield both


@contextlib.asynccontextmanager
async def stacks(
    folder: Path, redis: RedisProcess, **changes: Any
) -> AsyncIterator[tuple[Stack, Stack]]:
    """Two gateways that write short streams, too, with workers that say the same, and one Redis."""
    for name in "ab":
        (folder / name).mkdir()
    config = {"redis": SharedRedisConfig(redis.url, timeout_s=5.0), "template": TEMPLATE, **changes}
    with mock.patch.object(journal, "MAX_REPEATED", 16):
        async with (
            gateway_stack(folder / "a", says=SAYS, **config) as one,
            gateway_stack(folder / "b", says=SAYS, **config) as other,
        ):
            yield one, other
            await one.idle()
            await other.idle()


def events_of(raw: bytes) -> list[Event]:
    events, last_id = [], ""
    for block in raw.decode().split("\n\n")[:-1]:
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            if name == "id":
                last_id = value.strip()
            elif name == "data":
                events.append(Event(last_id, value.strip()))
    return events


async def post(
    stack: Stack, path: str, body: Any, last_id: str = "", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """Sends a body as it is, or nothing."""
    headers = {"Accept": "text/event-stream", **headers}
    if last_id:
        headers["Last-Event-ID"] = last_id
    data = json.dumps(body) if body is not None else None
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/{path}", data=data, headers=headers) as response,
    ):
        return response.status, await response.read(), dict(response.headers)


async def written(stack: Stack) -> None:
    """Waits until the journal has a stream, so that its client need not send its body again."""
    metrics = stack.gateway.metrics
    await stack.mesh.until(lambda: metrics.value("kvmesh_gateway_journal_bytes") > 0)


def by_choice(events: Sequence[Event]) -> dict[int, list[str]]:
    """Data of each choice's events; those of none count as -1's."""
    found: dict[int, list[str]] = {}
    for event in events:
        choices = [] if event.data == "[DONE]" else json.loads(event.data)["choices"]
        found.setdefault(choices[0]["index"] if choices else -1, []).append(event.data)
    return found


@pytest.mark.parametrize(
    ("path", "says", "fields"),
    [
        ("chat/completions", SAYS, {}),
        ("chat/completions", SAYS, {**USAGE, "seed": 5}),
        ("completions", SAYS, {**COUNTS, "return_token_ids": True}),
        ("completions", SAYS, {"logprobs": 2, "echo": True}),
        ("completions", SAYS, {"prompt": ["hi", "ho"], "n": 2, "max_tokens": 9}),
        ("completions", SAYS, {"max_tokens": 0, "echo": True}),
        ("completions", SAYS, {"stop": ["tokens", " is lost or repeated: 🙂"]}),
        ("chat/completions", f"<think>well, {CALL}</think>So: {CALL} {CALL}", {"tools": [WEATHER]}),
        ("chat/completions", "<think>well,\n\nwell</think>\n\nyes 🙂", {**USAGE, "n": 2}),
        ("chat/completions", "well,</think> yes", {"chat_template_kwargs": {"thinks": True}}),
        ("chat/completions", SAYS, {"logprobs": True, "top_logprobs": 1, "max_tokens": 20}),
    ],
)
async def test_a_stream_goes_on_behind_every_event(
    two: tuple[Stack, Stack], path: str, says: str, fields: dict[str, Any]
) -> None:
    one, other = two
    one.says(says)
    other.says(says)
    body = {**(TEXT if path == "completions" else CHAT), **fields}
    status, raw, headers = await post(one, path, body, **{"x-request-id": "mine"})
    assert status == 200, raw
    assert headers["x-kvmesh-seed"].isdecimal()
    events = events_of(raw)
    assert events[-1].data == "[DONE]"
    assert all(event.last_id for event in events)
    for count, event in enumerate(events, 1):
        status, raw, again = await post(other, path, body, event.last_id)
        assert status == 200, (event, raw)
        assert again["x-kvmesh-seed"] == headers["x-kvmesh-seed"]
        # The closing event has the id of the one before: it is sent again.
        rest = events[count:] or events[-1:]
        assert by_choice(events_of(raw)) == by_choice(rest), event


async def test_the_tokens_before_the_break_are_not_made_again(two: tuple[Stack, Stack]) -> None:
    one, other = two
    _, raw, _ = await post(one, "completions", TEXT)
    events = events_of(raw)
    await written(one)
    await post(other, "completions", None, events[9].last_id)  # what it asked is known
    (spec,) = other.mesh.workers["p1"].specs
    (place,) = parse_id(events[9].last_id).places
    assert len(spec.token_ids) == spec.num_prompt_tokens + place.num_kept + len(place.tail)
    assert other.gateway.metrics.value("kvmesh_gateway_resumes_total", outcome="resumed") == 1


async def test_what_the_journal_lacks_the_id_has(
    two: tuple[Stack, Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that dies before its next write."""
    one, other = two
    monkeypatch.setattr(journal, "FLUSH_S", 3600.0)
    _, raw, _ = await post(one, "completions", TEXT)
    events = events_of(raw)
    for count, event in enumerate(events[:-2], 1):
        _, raw, _ = await post(other, "completions", TEXT, event.last_id)
        assert [each.data for each in events_of(raw)] == [each.data for each in events[count:]]
    # And from there to a third.
    again = events_of(raw)
    assert again[0].last_id.partition(":")[0] != events[0].last_id.partition(":")[0]


async def test_another_checkpoint_does_not_go_on_with_a_stream(tmp_path: Path) -> None:
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis, limits={"ttft_deadline_ms": 500}) as (one, other):
            _, raw, _ = await post(one, "completions", TEXT)
            await now_hold(other, "another")
            last_id = events_of(raw)[9].last_id
            status, raw, headers = await post(other, "completions", TEXT, last_id)
            assert (status, headers["x-kvmesh-refusal"]) == (503, "gateway-no_workers")
            assert b"no worker of checkpoint tiny-fingerprint" in raw
            # A new stream is served.
            assert (await post(other, "completions", TEXT))[0] == 200


async def now_hold(stack: Stack, checkpoint: str) -> None:
    """All workers hold another checkpoint from now on."""
    for worker in stack.mesh.workers.values():
        layout = replace(worker.info.layout, model_fingerprint=checkpoint)
        worker.info = replace(worker.info, layout=layout)
    seen = stack.mesh.fleet_seen
    stack.mesh.changed.set()
    await stack.mesh.until(lambda: stack.mesh.fleet_seen > seen)


async def test_a_checkpoint_that_vanished_before_the_first_token_is_not_asked_for(
    two: tuple[Stack, Stack],
) -> None:
    """What counts is the checkpoint that made the tokens, not the one that was to make them."""
    one, other = two
    for worker in one.mesh.workers.values():
        worker.does.refuse_reserves = worker.does.reject_offers = -1
    asking = asyncio.create_task(post(one, "completions", TEXT))
    await one.mesh.until(lambda: bool(one.gateway.metrics.refusals()))
    await now_hold(one, "newer")
    await one.mesh.until(lambda: one.mesh.queries[-1].fingerprint == "newer")
    await now_hold(other, "newer")
    for worker in one.mesh.workers.values():
        worker.does.refuse_reserves = worker.does.reject_offers = 0
    status, raw, _ = await asking
    assert status == 200, raw
    events = events_of(raw)
    for body in (TEXT, None):
        status, raw, _ = await post(other, "completions", body, events[9].last_id)
        assert status == 200, raw
        assert [each.data for each in events_of(raw)] == [each.data for each in events[10:]]
        await written(one)


async def test_a_stream_that_is_cut_goes_on_while_it_runs(two: tuple[Stack, Stack]) -> None:
    one, other = two
    whole = events_of((await post(one, "completions", TEXT))[1])
    one.mesh.workers["d1"].does.stall_decode_after = 20
    read = b""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{one.url}/v1/completions", json=TEXT, headers={"Accept": "text/event-stream"}
        ) as response,
    ):
        while read.count(b"\n\n") < 12:
            read += await response.content.readany()
        events = events_of(read)  # the half event at its end is none
        status, raw = 410, b""
        while status == 410:  # until it is written
            status, raw, _ = await post(other, "completions", None, events[-1].last_id)
    assert status == 200, raw
    texts = [_text(event) for event in events + events_of(raw)]
    assert texts == [_text(event) for event in whole]


def _text(event: Event) -> str:
    is_text = event.data != "[DONE]"
    return str(json.loads(event.data)["choices"][0]["text"]) if is_text else event.data


@pytest.mark.parametrize("sends_body", [True, False])
async def test_a_stream_goes_on_twice_at_the_same_time(
    two: tuple[Stack, Stack], sends_body: bool
) -> None:
    """At both gateways and twice at one, and each of these streams goes on once more."""
    one, other = two
    events = events_of((await post(one, "completions", TEXT))[1])
    await written(one)
    body, rest = TEXT if sends_body else None, list(map(_text, events[7:]))
    last_id = events[6].last_id
    answers = await asyncio.gather(
        *(post(each, "completions", body, last_id) for each in (one, other, other))
    )
    keys = set()
    for status, raw, _ in answers:
        assert status == 200, raw
        again = events_of(raw)
        assert list(map(_text, again)) == rest
        keys.add(parse_id(again[-2].last_id).key)
        _, once_more, _ = await post(one, "completions", TEXT, again[4].last_id)
        assert list(map(_text, events_of(once_more))) == rest[5:]
    assert len(keys) == 3, "two gateways never write to one key"


async def test_ids_that_nobody_gave(two: tuple[Stack, Stack]) -> None:
    one, other = two
    _, raw, _ = await post(one, "completions", {**TEXT, "max_tokens": 20})
    await written(one)
    last_id = events_of(raw)[1].last_id
    key = parse_id(last_id).key

    async def refusal(last_id: str, body: Any = None, path: str = "completions") -> Any:
        status, raw, _ = await post(other, path, body, last_id)
        return status, json.loads(raw)["error"]["code"]

    assert (await refusal("?" + last_id))[0] == 400
    assert (await refusal(last_id, {**TEXT, "max_tokens": 5}))[0] == 400
    assert (await refusal(f"{key}:1.ffffff"))[0] == 400
    assert (await refusal(f"{key}.e30:1.1", TEXT))[0] == 400
    gone = (410, "stream_gone")
    assert await refusal(last_id, path="chat/completions") == gone
    assert await refusal(f"{'x' * 22}:1") == gone
    assert await refusal(f"{key}:1,1") == gone
    assert await refusal(f"{key}:20") == gone  # all tokens, but no end
    assert await refusal(f"{key}:5000") == gone
    assert other.gateway.metrics.value("kvmesh_gateway_resumes_total", outcome="gone") == 5


@pytest.mark.parametrize("accept", ["text/event-stream", "text/event-stream, ü"])
async def test_a_forged_start_puts_nothing_into_the_head(
    two: tuple[Stack, Stack], accept: str
) -> None:
    """By the plain way and by aiohttp's, which takes the odd header."""
    one, other = two
    _, raw, _ = await post(one, "completions", TEXT, **{"x-request-id": "mine"})
    events = events_of(raw)
    key, _, rest = events[0].last_id.partition(".")
    start, _, places = rest.partition(":")
    told = urlsafe_b64decode(start + "=" * (-len(start) % 4))
    forged = urlsafe_b64encode(told.replace(b"mine", b"me\r\nx-evil: 1")).decode().rstrip("=")
    status, raw, headers = await post(
        other, "completions", TEXT, f"{key}.{forged}:{places}", Accept=accept
    )
    names = {name.lower(): value for name, value in headers.items()}
    assert (status, "x-evil" in names) == (200, False), raw
    assert names["x-request-id"].isalnum()
    assert list(map(_text, events_of(raw))) == list(map(_text, events[1:]))


async def test_a_resumed_stream_has_the_limits_that_its_client_names(
    two: tuple[Stack, Stack],
) -> None:
    one, other = two
    limits = {"x-slo-ttft-ms": "7000", "x-slo-tpot-ms": "60", "x-slo-itl-ms": "90"}
    _, raw, _ = await post(one, "completions", TEXT, **limits)
    await post(other, "completions", TEXT, events_of(raw)[9].last_id, **limits)
    (before,), (after,) = one.mesh.queries, other.mesh.queries
    assert (after.tpot_s, before.tpot_s) == (0.06, 0.06)


async def test_streams_that_cannot_go_on_say_so(two: tuple[Stack, Stack]) -> None:
    one, _ = two
    many = {**TEXT, "prompt": ["hi"] * 17, "max_tokens": 2}
    _, raw, headers = await post(one, "completions", many)
    assert headers["x-kvmesh-resumable"] == "no; more than 16 choices"
    assert not any(event.last_id for event in events_of(raw))
    _, _, headers = await post(one, "completions", {**many, "prompt": ["hi"] * 16})
    assert "x-kvmesh-resumable" not in headers
    for path in ("responses", "messages"):
        status, raw, _ = await post(one, path, {"model": MODEL, "input": "hi"}, f"{'x' * 22}:1")
        assert (status, b"cannot be resumed" in raw) == (400, True)


async def test_prompts_of_other_tokens_are_not_gone_on_with(tmp_path: Path) -> None:
    """A template that says the time, or another model under the same name."""
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis) as (one, _):
            _, raw, _ = await post(one, "chat/completions", CHAT)
            await written(one)
            (tmp_path / "c").mkdir()
            shared, template = SharedRedisConfig(redis.url, timeout_s=5.0), f"Now: {TEMPLATE}"
            async with gateway_stack(tmp_path / "c", redis=shared, template=template) as third:
                last_id = events_of(raw)[3].last_id
                for body in (None, CHAT):
                    assert (await post(third, "chat/completions", body, last_id))[0] == 410


async def test_tenants_go_on_with_their_own_streams_alone(tmp_path: Path) -> None:
    keys = AccessConfig(api_keys="mine,yours")
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis, access=keys) as (one, other):
            mine, yours = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer yours"}
            _, raw, _ = await post(one, "completions", TEXT, **mine)
            await written(one)
            last_id = events_of(raw)[4].last_id
            assert (await post(other, "completions", TEXT, last_id, **yours))[0] == 410
            assert (await post(other, "completions", None, last_id, **yours))[0] == 410
            assert (await post(other, "completions", None, last_id))[0] == 401
            assert (await post(other, "completions", None, last_id, **mine))[0] == 200


async def test_a_prompt_is_paid_once_if_its_stream_is_resumed_once(tmp_path: Path) -> None:
    """Resuming from the same place again computes the prompt again, which is not free."""
    keys, key = AccessConfig(api_keys="mine"), {"Authorization": "Bearer mine"}
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis, access=keys) as (one, other):
            charged = "kvmesh_gateway_tenant_tokens_total"
            _, raw, _ = await post(one, "completions", {**TEXT, "prompt": "p" * 40}, **key)
            await written(one)
            whole, last_id = (
                one.gateway.metrics.value(charged, tenant=""),
                events_of(raw)[4].last_id,
            )
            found = [0.0]
            for _ in range(3):
                assert (await post(other, "completions", None, last_id, **key))[0] == 200
                found.append(other.gateway.metrics.value(charged, tenant=""))
            rest, again, third = (after - before for before, after in itertools.pairwise(found))
            assert again == third
            num_prompt = again - rest
            assert 0 < whole - num_prompt - rest <= 5, "five events came before"


@pytest.mark.parametrize(
    ("headers", "has_ids"),
    [
        ({"Accept": "*/*"}, False),
        ({"Accept": "application/json"}, False),
        ({"Accept": "application/json, text/event-stream"}, True),
        ({"Accept": "*/*", "Last-Event-ID": ""}, True),
    ],
    ids=str,
)
async def test_clients_that_read_data_alone_get_no_ids(
    two: tuple[Stack, Stack], headers: dict[str, str], has_ids: bool
) -> None:
    """`vllm bench serve` takes what is between two empty lines for `data: ` and JSON."""
    _, raw, _ = await post(two[0], "completions", TEXT, **headers)
    blocks = raw.split(b"\n\n")[:-1]
    assert {block.startswith(b"data: ") for block in blocks[:-2]} == {not has_ids}


async def test_without_redis_streams_are_as_they_were(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, says=SAYS) as stack:
        _, raw, _ = await post(stack, "completions", TEXT)
        assert b"id:" not in raw.replace(b'"id":', b"")
        assert (await post(stack, "completions", TEXT, f"{'x' * 22}:1"))[0] == 410


async def test_redis_dies_under_streams(tmp_path: Path) -> None:
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis) as (one, other):
            _, raw, _ = await post(one, "completions", TEXT)
            await written(one)
            last_id = events_of(raw)[4].last_id
            redis.stop(kill=True)
            status, _, headers = await post(other, "completions", None, last_id)
            assert (status, headers["Retry-After"]) == (503, "1")
            events = events_of((await post(one, "completions", TEXT))[1])
            assert "".join(map(_text, events[:-1])) == SAYS
            # Ids say enough themselves, if the client sends its request again.
            _, raw, _ = await post(other, "completions", TEXT, events[9].last_id)
            assert [each.data for each in events_of(raw)] == [each.data for each in events[10:]]
            redis.start()
            # It is written as soon as that is possible, and what Redis has forgotten is gone.
            while (await post(other, "completions", None, events[9].last_id))[0] != 200:
                await asyncio.sleep(0.01)
            assert (await post(other, "completions", None, last_id))[0] == 410


async def test_the_journal_has_a_bound_and_a_lifetime(tmp_path: Path) -> None:
    with redis_process(tmp_path) as redis:
        small = ResumeConfig(journal_mib=1, keep_s=3600.0)
        async with stacks(tmp_path, redis, resume=small) as (one, other):
            bodies = [{**TEXT, "max_tokens": 20, "ignored": "x" * 60_000} for _ in range(20)]
            streams = [events_of((await post(one, "completions", each))[1]) for each in bodies]
            ids = [events[0].last_id for events in streams]
            while (await post(other, "completions", None, ids[-1]))[0] != 200:
                await asyncio.sleep(0.01)
            held = one.gateway.metrics.value("kvmesh_gateway_journal_bytes")
            assert 900_000 < held <= 1 << 20
            while (await post(other, "completions", None, ids[0]))[0] != 410:
                await post(one, "completions", TEXT)  # which has it dropped
        (tmp_path / "again").mkdir()
        short = ResumeConfig(keep_s=0.2)
        async with stacks(tmp_path / "again", redis, resume=short) as (one, other):
            _, raw, _ = await post(one, "completions", TEXT)
            await written(one)
            while (await post(other, "completions", None, events_of(raw)[0].last_id))[0] != 410:
                await asyncio.sleep(0.01)
            metrics = one.gateway.metrics
            await one.mesh.until(lambda: metrics.value("kvmesh_gateway_journal_bytes") == 0)
