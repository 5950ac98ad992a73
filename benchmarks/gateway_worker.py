"""A worker for `benchmarks.gateway` that computes nothing: our real protocol, made-up tokens.

It registers with a real scheduler, publishes the blocks of its prompts to a real kvmanager,
reserves, accepts or rejects, and sends one step's tokens of all its sequences in one message, as a
real worker does. Lines of JSON on standard input change how it behaves; see `Behaviour`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop

from kvmesh.core.types import BlockHash, Endpoint, KvLayout, Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.kv.hashing import chain_hashes
from kvmesh.rpc.channels import bind_server, make_server
from kvmesh.rpc.direct import DirectListener
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.publisher import BlockPublisher, PublisherFacts
from kvmesh.rpc.registration import SchedulerRegistration
from kvmesh.rpc.served import DirectWay, serve_stream
from kvmesh.runtime.local_start import PrefillOutbox, StartedOutbox
from kvmesh.v1 import decode_service_pb2 as decode_pb
from kvmesh.v1 import decode_service_pb2_grpc as decode_grpc
from kvmesh.v1 import prefill_service_pb2 as prefill_pb
from kvmesh.v1 import prefill_service_pb2_grpc as prefill_grpc
from kvmesh.v1 import types_pb2

LAYOUT = KvLayout("bench", "float32", 16, 2, 2, 8)
NUM_BLOCKS, SLOTS, MAX_LEN = 1 << 20, 4096, 1 << 16
FIRST_WORD, NUM_WORDS = 300, 2000

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How fast a worker is.

    Attributes:
        prefill_s: time to a prompt's first token.
        slots: prompts at a time; one more is rejected.
        step_s: time between two tokens of a sequence; 0: the next one as soon as possible.
        goes_on_s: sequences whose gateway has died go on for so long, until another gateway asks
            for one; our workers do not.
    """

    prefill_s: float = 0.0
    slots: int = SLOTS
    step_s: float = 0.0
    goes_on_s: float = 0.0


def word_at(position: int) -> int:
    """The token at a position; it depends on nothing else, so a moved stream goes on with it."""
    return FIRST_WORD + position * 7 % NUM_WORDS


@dataclass(slots=True, eq=False)
class Sequence:
    """A reservation, later a sequence that decodes.

    Attributes:
        position: of the next token.
        end: position after the last one.
        num_logprobs: likely tokens to tell with each; -1: no log-probabilities.
        prompt: its token ids.
        outbox: None where nobody reads it.
    """

    key: Key
    outbox: Outbox[Any] | None
    position: int
    end: int
    num_logprobs: int = -1
    prompt: tuple[int, ...] = ()

    def scores(self) -> types_pb2.TokenLogprobs | None:
        """Made-up log-probabilities, if some are wanted."""
        if self.num_logprobs < 0:
            return None
        ranks = range(self.num_logprobs)
        return types_pb2.TokenLogprobs(
            logprob=-0.5,
            top_ids=[word_at(self.position + rank) for rank in ranks],
            top_logprobs=[-0.5 - rank for rank in ranks],
            rank=1,
        )


@dataclass(slots=True)
class Events:
    """Blocks that a worker holds since it last said so."""

    stored: list[BlockHash] = field(default_factory=list)
    removed: list[BlockHash] = field(default_factory=list)


class Blocks:
    """The blocks that a worker says it holds; it never lets go of one."""

    def __init__(self, kvmanager: str, info: WorkerInfo) -> None:
        self._held: dict[BlockHash, None] = {}
        self._events = Events()
        namespace = LAYOUT.model_fingerprint
        facts = PublisherFacts(
            info.worker_id, info.incarnation, "local", namespace, LAYOUT.block_size
        )
        self.publisher = BlockPublisher(
            kvmanager, facts, take_events=self._take, held_hashes=lambda: list(self._held)
        )

    def _take(self) -> Events:
        events, self._events = self._events, Events()
        return events

    def hold(self, sequence: types_pb2.SequenceSpec) -> int:
        """A prompt's blocks; how many of its tokens were there already."""
        root = BlockHash(sequence.root_hash)
        hashes = chain_hashes(root, sequence.token_ids, LAYOUT.block_size)
        fresh = [each for each in hashes if each not in self._held]
        self._held.update(dict.fromkeys(fresh))
        self._events.stored += fresh
        self.publisher.notify()
        return LAYOUT.block_size * (len(hashes) - len(fresh))


class Worker(prefill_grpc.PrefillServiceServicer, decode_grpc.DecodeServiceServicer):
    """Both services of one worker."""

    def __init__(self, name: str, kvmanager: str, role: Role = Role.HYBRID) -> None:
        self.behaviour = Behaviour()
        self.server = make_server()
        port = bind_server(self.server, "127.0.0.1", 0)
        endpoint = Endpoint("127.0.0.1", port)
        self.info = WorkerInfo(
            WorkerId(name), os.getpid(), role, "local", endpoint, endpoint, "fake", LAYOUT,
            MAX_LEN, SLOTS, SLOTS, NUM_BLOCKS, publishes=True,
        )  # fmt: skip
        self.reservation = types_pb2.Reservation(
            worker_id=name,
            incarnation=self.info.incarnation,
            capability=b"0123456789abcdef",
            data_endpoint=types_pb2.Endpoint(host="127.0.0.1", port=port),
            num_blocks=4,
            lease_ms=60_000,
        )
        self.blocks = Blocks(kvmanager, self.info)
        self._held: dict[int, Sequence] = {}
        self._running: dict[Key, Sequence] = {}
        self._offers: dict[tuple[str, int, int], asyncio.TimerHandle | None] = {}
        self._left: dict[tuple[int, ...], Sequence] = {}
        self._num_reserved = 0
        self._wake = asyncio.Event()
        self.direct = DirectListener()
        self._decode_way: DirectWay[decode_pb.DecodeEvent] = DirectWay(
            self.direct,
            decode_pb.DecodeRequest,
            lambda events: (decode_pb.DecodeResponse(events=events),),
        )
        self._prefill_way: DirectWay[prefill_pb.PrefillEvent] = DirectWay(
            self.direct,
            prefill_pb.PrefillRequest,
            lambda events: (prefill_pb.PrefillResponse(events=events),),
        )
        prefill_grpc.add_PrefillServiceServicer_to_server(self, self.server)
        decode_grpc.add_DecodeServiceServicer_to_server(self, self.server)

    def load(self) -> WorkerLoad:
        """The load, as the scheduler hears of it."""
        return WorkerLoad(
            prefill_active=len(self._offers),
            decode_running=len(self._running),
            decode_reserved=len(self._held),
            blocks_free=NUM_BLOCKS,
        )

    # --- decode ---

    async def Decode(
        self, request_iterator: AsyncIterator[decode_pb.DecodeRequest], context: Any
    ) -> AsyncIterator[decode_pb.DecodeResponse]:
        """One gateway's stream."""
        async for events in serve_stream(
            request_iterator, context, self._receive_decode, self._forget, self._decode_way
        ):
            yield decode_pb.DecodeResponse(events=events)

    def _receive_decode(
        self, request: decode_pb.DecodeRequest, outbox: Outbox[decode_pb.DecodeEvent]
    ) -> None:
        kind = request.WhichOneof("message")
        if kind == "reserve":
            reserve = request.reserve
            if not reserve.start_within_ms:
                outbox.put(self._reserve(reserve, outbox))
                return
            name = (reserve.request_id, reserve.attempt, id(outbox))
            if self._is_busy:
                event = decode_pb.DecodeEvent(request_id=name[0], attempt=name[1])
                _reject(event.prefill)
                outbox.put(event)
                return
            event = decode_pb.DecodeEvent(request_id=name[0], attempt=name[1])
            # Nobody else writes there, so nobody is told how.
            event.reserved.worker_id = self.reservation.worker_id
            event.reserved.incarnation = self.reservation.incarnation
            event.reserved.lease_ms = self.reservation.lease_ms
            number = self._hold(reserve, outbox)
            self._accept(name, number, reserve.sequence, StartedOutbox(event, outbox))
        elif kind == "cancel":
            key = (request.cancel.request_id, request.cancel.attempt)
            self._cancel((*key, id(outbox)))
            self._running.pop(key, None)
            for number in [n for n, held in self._held.items() if held.key == key]:
                del self._held[number]

    def _reserve(
        self, message: decode_pb.DecodeReserve, outbox: Outbox[Any]
    ) -> decode_pb.DecodeEvent:
        event = decode_pb.DecodeEvent(request_id=message.request_id, attempt=message.attempt)
        event.reserved.CopyFrom(self.reservation)
        event.reserved.reservation_id = self._hold(message, outbox)
        event.reserved.generation = message.attempt
        return event

    def _hold(self, message: decode_pb.DecodeReserve, outbox: Outbox[Any]) -> int:
        """Keeps a sequence until its prompt is computed; the number of its reservation."""
        self._num_reserved += 1
        sequence = message.sequence
        end = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        key = (message.request_id, message.attempt)
        position = len(sequence.token_ids)
        num_logprobs = sequence.sampling.num_logprobs
        made = Sequence(key, outbox, position, end, num_logprobs, _prompt_of(sequence))
        self._held[self._num_reserved] = made
        return self._num_reserved

    def _forget(self, outbox: Outbox[Any]) -> None:
        for key, each in [*self._running.items()]:
            if each.outbox is outbox and self.behaviour.goes_on_s:
                each.outbox, self._left[each.prompt] = None, each
                loop = asyncio.get_running_loop()
                loop.call_later(self.behaviour.goes_on_s, self._give_up, each)
            elif each.outbox is outbox:
                del self._running[key]
        for number in [number for number, each in self._held.items() if each.outbox is outbox]:
            del self._held[number]

    def computes_for(self, decode: Worker) -> None:
        """Hands its prompts over to a decode worker of this process."""
        self._held, self._running, self._wake = decode._held, decode._running, decode._wake
        self._left = decode._left

    def _give_up(self, sequence: Sequence) -> None:
        """Nobody has asked for it."""
        if self._left.get(sequence.prompt) is sequence:
            del self._left[sequence.prompt]
            self._running.pop(sequence.key, None)

    async def run_steps(self) -> None:
        """Decodes until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            due = loop.time()
            while self._running:
                due = max(due + self.behaviour.step_s, loop.time())
                await asyncio.sleep(due - loop.time())
                for sequence in tuple(self._running.values()):
                    self._emit(sequence)
            self._wake.clear()

    def _emit(self, sequence: Sequence) -> None:
        if sequence.outbox is None:
            sequence.position += 1
            if sequence.position == sequence.end:
                del self._running[sequence.key]
            return
        event = decode_pb.DecodeEvent(request_id=sequence.key[0], attempt=sequence.key[1])
        event.tokens.first_position = sequence.position
        event.tokens.token_ids.append(word_at(sequence.position))
        if (scores := sequence.scores()) is not None:
            event.tokens.logprobs.append(scores)
        sequence.position += 1
        if sequence.position == sequence.end:
            event.tokens.finish_reason = types_pb2.FINISH_REASON_LENGTH
            del self._running[sequence.key]
        sequence.outbox.put(event)

    # --- prefill ---

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb.PrefillRequest], context: Any
    ) -> AsyncIterator[prefill_pb.PrefillResponse]:
        """One gateway's stream."""
        async for events in serve_stream(
            request_iterator, context, self._receive_prefill, self._drop_offers, self._prefill_way
        ):
            yield prefill_pb.PrefillResponse(events=events)

    def _drop_offers(self, outbox: Outbox[Any]) -> None:
        for name in [name for name in self._offers if name[2] == id(outbox)]:
            self._cancel(name)

    def _cancel(self, name: tuple[str, int, int]) -> None:
        timer = self._offers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _receive_prefill(
        self, request: prefill_pb.PrefillRequest, outbox: Outbox[prefill_pb.PrefillEvent]
    ) -> None:
        if request.WhichOneof("message") == "cancel":
            self._cancel((request.cancel.request_id, request.cancel.attempt, id(outbox)))
            return
        offer = request.offer
        if self._is_busy and _prompt_of(offer.sequence) not in self._left:
            event = prefill_pb.PrefillEvent(request_id=offer.request_id, attempt=offer.attempt)
            _reject(event)
            outbox.put(event)
            return
        name = (offer.request_id, offer.attempt, id(outbox))
        self._accept(name, offer.reservation.reservation_id, offer.sequence, outbox)

    @property
    def _is_busy(self) -> bool:
        return len(self._offers) >= self.behaviour.slots

    def _accept(
        self,
        name: tuple[str, int, int],
        number: int,
        spec: types_pb2.SequenceSpec,
        outbox: PrefillOutbox,
    ) -> None:
        event = prefill_pb.PrefillEvent(request_id=name[0], attempt=name[1])
        event.accepted.cached_tokens = self.blocks.hold(spec)
        outbox.put(event)
        prefill_s = self.behaviour.prefill_s
        left = self._left.pop(_prompt_of(spec), None)
        if left is not None:  # its tokens are there
            self._running.pop(left.key, None)
            self._first(name, number, outbox)
            own = self._running.get((name[0], name[1]))
            while own is not None and own.position < left.position:
                self._emit(own)
        elif prefill_s:
            loop = asyncio.get_running_loop()
            self._offers[name] = loop.call_later(prefill_s, self._first, name, number, outbox)
        else:
            self._first(name, number, outbox)

    def _first(self, name: tuple[str, int, int], number: int, outbox: PrefillOutbox) -> None:
        """The first token, and the handoff at once: decode is here as well."""
        self._offers.pop(name, None)
        sequence = self._held.pop(number, None)
        if sequence is None:
            return  # cancelled meanwhile
        event = prefill_pb.PrefillEvent(request_id=name[0], attempt=name[1])
        event.first_token.token_id = word_at(sequence.position)
        if (scores := sequence.scores()) is not None:
            event.first_token.logprobs.CopyFrom(scores)
        sequence.position += 1
        if sequence.position >= sequence.end:
            event.first_token.finish_reason = types_pb2.FINISH_REASON_LENGTH
            outbox.put(event)
            return
        outbox.put(event)
        over = prefill_pb.PrefillEvent(request_id=name[0], attempt=name[1])
        over.handed_off.calls = 0
        outbox.put(over)
        self._running[sequence.key] = sequence
        self._wake.set()


def _prompt_of(sequence: types_pb2.SequenceSpec) -> tuple[int, ...]:
    return tuple(sequence.token_ids[: sequence.num_prompt_tokens])


def _reject(event: prefill_pb.PrefillEvent) -> None:
    event.rejected.reason = types_pb2.REFUSAL_REASON_BUSY
    event.rejected.message = "all prefill slots are taken"


async def follow_commands(workers: Collection[Worker]) -> None:
    """Has the workers behave as standard input says, until it ends."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        for worker in workers:
            worker.behaviour = replace(Behaviour(), **json.loads(line))
        sys.stdout.write("changed\n")
        sys.stdout.flush()


async def main(name: str, scheduler: str, kvmanager: str, *words: str) -> None:
    """Serves until standard input ends.

    Args:
        words: `roles` for a prefill and a decode worker instead of one that is both.
    """
    if "roles" in words:
        decode = Worker(f"{name}-decode", kvmanager, Role.DECODE)
        workers = [decode, Worker(f"{name}-prefill", kvmanager, Role.PREFILL)]
        workers[1].computes_for(decode)
    else:
        workers = [Worker(name, kvmanager)]
    tasks = [asyncio.create_task(workers[0].run_steps())]
    for worker in workers:
        await worker.direct.start()
        await worker.server.start()
        tasks.append(asyncio.create_task(worker.blocks.publisher.run()))
        registration = SchedulerRegistration([scheduler], worker.info, worker.load, lambda _: None)
        tasks.append(asyncio.create_task(registration.run()))
        await registration.wait_registered(30)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await follow_commands(workers)
    for task in tasks:
        task.cancel()
    for worker in workers:
        await worker.server.stop(0)
        await worker.direct.close()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
