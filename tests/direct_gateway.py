"""A gateway without streams: its messages reach a worker's roles at once, its events come back so.

Faster than `worker_driver.Driver`, for tests that run hundreds of requests.
"""

from __future__ import annotations

import asyncio

from kvmesh.core.types import PrefixSource, SequenceSpec
from kvmesh.rpc.convert import sequence_spec_to_proto
from kvmesh.rpc.convert_route import prefix_source_to_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.runtime.worker import Worker
from kvmesh.v1 import decode_service_pb2 as decode_pb
from kvmesh.v1 import prefill_service_pb2 as prefill_pb

NAME = "r"
ATTEMPT = 1


class DirectGateway:
    """One request of one gateway, on a worker for its prompt and one for its answer.

    Attributes:
        tokens: that came, in order.
        is_finished: the last of them came.
        failure: reason of the worker that gave up; empty when none did.
    """

    def __init__(self, prefill: Worker, decode: Worker, spec: SequenceSpec) -> None:
        self._prefill, self._decode = prefill, decode
        self.spec = spec
        self.tokens: list[int] = []
        self.is_finished = False
        self.failure = ""
        self._news = asyncio.Event()
        self._to_prefill: Outbox[prefill_pb.PrefillEvent] = Outbox()
        self._to_prefill.divert(self._from_prefill)
        self._to_decode: Outbox[decode_pb.DecodeEvent] = Outbox()
        self._to_decode.divert(self._from_decode)
        self._source: PrefixSource | None = None

    def start(self, source: PrefixSource | None = None, *, at_once: bool = False) -> None:
        """Reserves; the prompt is offered as soon as there is room for it.

        Args:
            source: who holds a prefix.
            at_once: the decode worker computes the prompt, asked in the same message.
        """
        self._source = source
        reserve = decode_pb.DecodeReserve(
            request_id=NAME, attempt=ATTEMPT, sequence=sequence_spec_to_proto(self.spec)
        )
        if at_once:
            reserve.start_within_ms = 10_000
            if source is not None:
                reserve.source.CopyFrom(prefix_source_to_proto(source))
        self._decode.decode._receive(decode_pb.DecodeRequest(reserve=reserve), self._to_decode)

    async def over(self) -> None:
        """Waits until no more tokens come."""
        while not (self.is_finished or self.failure):
            self._news.clear()
            await self._news.wait()

    # --- what may come in between ------------------------------------------------------------

    def cancel(self) -> None:
        """Cancels at both workers."""
        self.cancel_prefill()
        self.cancel_decode()

    def cancel_prefill(self) -> None:
        """Cancels at the prefill worker only."""
        cancel = prefill_pb.PrefillCancel(request_id=NAME, attempt=ATTEMPT)
        self._prefill.prefill._receive(prefill_pb.PrefillRequest(cancel=cancel), self._to_prefill)
        self._end("prefill cancelled")

    def cancel_decode(self) -> None:
        """Cancels at the decode worker only."""
        cancel = decode_pb.DecodeCancel(request_id=NAME, attempt=ATTEMPT)
        self._decode.decode._receive(decode_pb.DecodeRequest(cancel=cancel), self._to_decode)
        self._end("decode cancelled")

    def hang_up(self) -> None:
        """Both streams end."""
        self._to_prefill.close()
        self._to_decode.close()
        self._prefill.prefill._stream_ended(self._to_prefill)
        self._decode.decode._stream_ended(self._to_decode)
        self._end("hung up")

    def renew(self) -> None:
        """Asks for more time."""
        renew = decode_pb.DecodeRenew(request_ids=[NAME])
        self._decode.decode._receive(decode_pb.DecodeRequest(renew=renew), self._to_decode)

    # --- events ------------------------------------------------------------------------------

    def _from_prefill(self, events: list[prefill_pb.PrefillEvent]) -> None:
        for event in events:
            self._take_prefill(event)

    def _take_prefill(self, event: prefill_pb.PrefillEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "rejected":
            self._end(f"rejected: {event.rejected.message}")
        elif kind == "failed":
            self._end(f"prefill failed: {event.failed.message}")
        elif kind == "first_token":
            assert not self.tokens
            self.tokens.append(event.first_token.token_id)
            if event.first_token.finish_reason:
                self._finish()

    def _from_decode(self, events: list[decode_pb.DecodeEvent]) -> None:
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "refused":
                self._end(f"refused: {event.refused.message}")
            elif kind == "failed":
                self._end(f"decode failed: {event.failed.message}")
            elif event.HasField("prefill"):  # maybe beside `reserved`
                self._take_prefill(event.prefill)
            elif kind == "reserved":
                self._offer(event)
            elif kind == "tokens":
                assert event.tokens.first_position == len(self.spec.token_ids) + len(self.tokens)
                self.tokens += event.tokens.token_ids
                if event.tokens.finish_reason:
                    self._finish()

    def _offer(self, event: decode_pb.DecodeEvent) -> None:
        if self.failure:
            return
        offer = prefill_pb.PrefillOffer(
            request_id=NAME,
            attempt=ATTEMPT,
            sequence=sequence_spec_to_proto(self.spec),
            reservation=event.reserved,
            ttft_budget_ms=10_000,
        )
        if self._source is not None:
            offer.source.CopyFrom(prefix_source_to_proto(self._source))
        self._prefill.prefill._receive(prefill_pb.PrefillRequest(offer=offer), self._to_prefill)

    def _finish(self) -> None:
        self.is_finished = True
        self._news.set()

    def _end(self, failure: str) -> None:
        self.failure = self.failure or failure
        self._news.set()
