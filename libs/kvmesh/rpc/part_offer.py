"""Offers another prefill worker a part of a prompt: a client of `PrefillService` in a worker.

Tests: tests/integration/test_prompt_chain.py.
"""

from __future__ import annotations

import asyncio

import grpc

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Endpoint, Refusal, RefusalReason
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess, open_channel
from kvmesh.rpc.convert import refusal_from_proto
from kvmesh.v1 import prefill_service_pb2 as pb
from kvmesh.v1.prefill_service_pb2_grpc import PrefillServiceStub


class PartOffer:
    """One offer on its own stream, so that the end of the stream ends the work."""

    def __init__(
        self, worker: Endpoint, message: pb.PrefillOffer, access: MeshAccess = NO_ACCESS
    ) -> None:
        self._worker = worker
        self._message = message
        self._channel = open_channel(str(worker), access)
        self._call = PrefillServiceStub(self._channel).Prefill()

    async def accepted(self, timeout_s: float) -> None:
        """Sends the offer and waits for the answer.

        Raises:
            RefusedError: the worker refuses, for example because it is busy.
            LostError: no answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(pb.PrefillRequest(offer=self._message))
                await self._until("accepted")
        except TimeoutError as error:
            raise LostError(f"{self._worker} did not answer an offer in {timeout_s} s") from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise LostError(f"{self._worker} takes no offers: {_words(error)}") from error

    async def handed_off(self) -> None:
        """Waits until all KV was taken.

        Raises:
            RefusedError: the worker could not continue.
            LostError: the stream ended before.
        """
        try:
            await self._until("handed_off")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise LostError(f"{self._worker} was lost: {_words(error)}") from error

    async def _until(self, kind: str) -> None:
        while isinstance(response := await self._call.read(), pb.PrefillResponse):
            for event in response.events:
                found = event.WhichOneof("event")
                if found in {"rejected", "failed"}:
                    raise RefusedError(refusal_from_proto(getattr(event, found)))
                if found == "first_token" and event.first_token.error:
                    raise RefusedError(Refusal(RefusalReason.INVALID, event.first_token.error))
                if found == kind:
                    return
        raise LostError(f"{self._worker} ended the stream")

    async def close(self) -> None:
        """Ends the stream, and with it the worker's work on the offer. May be called again."""
        self._call.cancel()
        await self._channel.close()


def _words(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details() or ''}".rstrip()
    return str(error)
