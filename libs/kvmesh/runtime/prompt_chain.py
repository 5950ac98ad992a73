"""One prompt on several prefill workers: this one computes the end, another one the beginning.

The other worker accepts the beginning like any prompt, with a reservation of this worker's blocks
for its KV, and computes it layer by layer. It sends each layer's KV as soon as it is complete, and
this worker, one layer behind, continues its own positions from it. So this worker ends with all KV
of the prompt and hands it over as if it had computed it alone. The first worker fetches a cached
prefix that it lacks. If the beginning is refused, or does not arrive, this worker computes it.
Why: docs/adr/0036-prompt-chains.md.
Tests: tests/integration/test_prompt_chain.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import PrefixSource, Reservation, SamplingParams
from kvmesh.engine.layer_gate import LayerGate
from kvmesh.engine.prefix_fill import PrefixFill
from kvmesh.engine.protocol import UpstreamPart
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.policy.chain import prefix_behind
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess
from kvmesh.rpc.convert import reservation_to_proto, sequence_spec_to_proto
from kvmesh.rpc.convert_route import prefix_source_to_proto
from kvmesh.rpc.part_offer import PartOffer
from kvmesh.runtime.arriving_kv import ArrivingKv
from kvmesh.runtime.chain_metrics import ChainMetrics
from kvmesh.runtime.layer_progress import LayerProgress
from kvmesh.runtime.part_arrival import PartArrival
from kvmesh.runtime.prefill_attempt import PrefillAttempt
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import prefill_service_pb2 as pb

log = event_logger(__name__)

ANSWER_S = 1.0
"""Seconds to wait for a worker's answer to an offer."""

# The beginning's next token is known from the prompt, so the generated one is not used. It must not
# end the sequence, since its KV would not be sent then.
_UNUSED = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


class PromptChain:
    """Lets other workers compute the beginnings of prompts.

    Args:
        arriving: receives their KV.
    """

    def __init__(
        self,
        parts: WorkerParts,
        arriving: ArrivingKv,
        metrics: ChainMetrics,
        access: MeshAccess = NO_ACCESS,
    ) -> None:
        self._parts = parts
        self._arriving = arriving
        self._access = access
        self._metrics = metrics

    async def begin(
        self, attempt: PrefillAttempt, source: PrefixSource, *, is_alone: bool
    ) -> PrefixSource | None:
        """Asks a source to compute the beginning of a prompt.

        Args:
            attempt: its sequence is HELD and has computed nothing; it may be released meanwhile.
                The caller runs it when this returns.
            is_alone: whether no other prompt here would have to wait for the whole chain.

        Returns:
            If no worker computes it: the source of the cached prefix that the first worker would
            have fetched; None if there is none.
        """
        if is_alone and await self._ask(attempt, source):
            return None
        prefix = prefix_behind(source)
        own = self._parts.identity.worker_id
        return None if prefix is None or prefix.worker_id == own else prefix

    async def _ask(self, attempt: PrefillAttempt, source: PrefixSource) -> bool:
        """Returns whether a source computes the beginning. If not, nothing is in flight."""
        sequence = attempt.sequence
        assert sequence is not None, "admitted"
        if sequence.state is SequenceState.GONE:
            return False
        fill = self._parts.core.begin_fill(sequence)
        fill.adopt()
        part = ChainedPart(self._parts, self._arriving, attempt, fill, self._count)
        outcome = "refused"
        try:
            reservation = part.open(min(source.num_blocks, len(fill.hashes)))
            if reservation is None:
                outcome = "held"
                return False
            offer = self._offer(attempt, source, reservation, part.end)
            await part.ask(PartOffer(source.control_endpoint, offer, self._access))
            outcome = "accepted"
        except (RefusedError, LostError) as error:
            log.info("part_not_taken", upstream=source.worker_id, error=str(error))
        finally:
            attempt.span.event("prompt_part", upstream=source.worker_id, outcome=outcome)
            self._count(outcome)
            if outcome != "accepted":
                part.close()
                # A worker that accepted too late may still be writing.
                await part.quiet.wait()
        return outcome == "accepted"

    def _count(self, outcome: str) -> None:
        self._metrics.parts.labels(outcome).inc()

    def _offer(
        self, attempt: PrefillAttempt, source: PrefixSource, reservation: Reservation, end: int
    ) -> pb.PrefillOffer:
        assert attempt.sequence is not None
        spec = attempt.sequence.spec
        beginning = replace(
            spec, token_ids=spec.token_ids[:end], num_prompt_tokens=end, sampling=_UNUSED
        )
        upstream = source.upstream
        return pb.PrefillOffer(
            request_id=attempt.request_id,
            attempt=attempt.attempt,
            sequence=sequence_spec_to_proto(beginning),
            reservation=reservation_to_proto(reservation),
            ttft_budget_ms=reservation.lease_ms,
            traceparent=attempt.span.traceparent,
            source=None if upstream is None else prefix_source_to_proto(upstream),
            is_part=True,
        )


class ChainedPart:
    """The beginning of one prompt, from making room for it until nothing writes there any more.

    Attributes:
        end: one past its last position, once it is open.
        quiet: set when nothing writes into the blocks, or will write.
    """

    def __init__(
        self,
        parts: WorkerParts,
        arriving: ArrivingKv,
        attempt: PrefillAttempt,
        fill: PrefixFill,
        count: Callable[[str], None],
    ) -> None:
        assert attempt.sequence is not None
        self._parts = parts
        self._arriving = arriving
        self._attempt = attempt
        self._sequence: Sequence = attempt.sequence
        self._fill = fill
        self._count = count
        self._kv: PartArrival | None = None
        self._is_filling = True
        self._waits_to_run = False
        self._watch: asyncio.Task[None] | None = None
        self.end = 0
        self.quiet = asyncio.Event()

    def open(self, num_blocks: int) -> Reservation | None:
        """Makes room for the KV of leading blocks. None without missing blocks, or without room."""
        size = self._parts.core.block_size
        held = self._fill.num_held
        # At least two tokens must remain, since one token would count as a decode step.
        num_tokens = len(self._sequence.tokens)
        num_blocks = min(num_blocks, (num_tokens - 2) // size)
        blocks = self._fill.open(num_blocks, num_tokens) if num_blocks > held else None
        if blocks is None:
            self._fill.end()
            self._is_filling = False
            self.quiet.set()
            return None
        attempt = self._attempt
        self._kv = PartArrival(
            attempt.request_id,
            attempt.attempt,
            blocks,
            self._fill.kinds,
            held,
            self._parts.core.spec.stages,
            LayerGate(self._parts.wake_engine),
            self._is_quiet,
        )
        self.end = num_blocks * size
        return self._arriving.reserve_part(self._kv)

    async def ask(self, offer: PartOffer) -> None:
        """Runs the sequence beside the part, if the offer is accepted.

        Raises:
            RefusedError, LostError: it is not accepted; the caller closes this part.
        """
        try:
            await offer.accepted(ANSWER_S)
        except BaseException:
            await offer.close()
            raise
        assert self._kv is not None
        self._attempt.upstream = self
        self._sequence.upstream = UpstreamPart(
            self.end, self._kv.gate, self._settle, self._fill.state
        )
        self._sequence.is_part = True
        self._watch = asyncio.create_task(self._follow(offer))

    async def _follow(self, offer: PartOffer) -> None:
        try:
            await offer.handed_off()
        except (RefusedError, LostError) as error:
            log.warning("part_lost", request_id=self._attempt.request_id, error=str(error))
            self._stop()
        finally:
            await offer.close()

    def close(self) -> None:
        """Ends the part; `quiet` is set later. May be called again."""
        if self._watch is not None:
            self._watch.cancel()
        self._stop()

    def _stop(self) -> None:
        if self._kv is not None and self._kv.reservation_id is not None:
            self._kv.gate.close()
            self._arriving.cancel_part(self._kv)

    def _is_quiet(self) -> None:
        """Called when nothing writes into the blocks any more, whether all arrived or not."""
        assert self._kv is not None
        self.quiet.set()
        if not self._kv.is_complete:
            self._end_fill(0)
            self._run_alone()

    def _settle(self, came: bool) -> None:
        """Called when the step beside the part has ended; see `UpstreamPart`."""
        assert self._kv is not None
        self._count("came" if came else "lost")
        if came:
            num_cached = self._sequence.num_cached
            self._end_fill(len(self._kv.arriving))
            # The blocks that another worker computed for this request do not count as cached.
            self._sequence.num_cached = num_cached
            return
        self._waits_to_run = True
        # Layers of this run may have been sent; the next run's layers differ in their last bits.
        self._attempt.layers = LayerProgress()
        self._stop()
        self._run_alone()

    def _end_fill(self, num_filled: int) -> None:
        if self._is_filling:
            self._is_filling = False
            self._fill.close(num_filled)
            self._fill.end()

    def _run_alone(self) -> None:
        """Computes the whole prompt here, once nothing else writes into its blocks."""
        if not self._waits_to_run or not self.quiet.is_set():
            return
        self._waits_to_run = False
        self._end_fill(0)
        if self._sequence.state is SequenceState.HELD:
            self._parts.core.run(self._sequence)
            self._parts.wake_engine()
