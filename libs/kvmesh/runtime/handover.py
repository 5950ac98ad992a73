"""Hands the KV of a prompt over to the decode worker: whole, by chunks, or by layers.

A sequence owns its blocks while it has them; blocks in transfer are held in addition.
Tests: tests/integration/test_worker.py, tests/integration/test_layered_handoff.py.
"""

from __future__ import annotations

import asyncio

from kvmesh.core.errors import RefusedError
from kvmesh.engine.sequence import SequenceState
from kvmesh.kv.stages import joined
from kvmesh.policy.transfer_mode import TransferMode, TransferTask, choose_transfer_mode
from kvmesh.runtime.layer_progress import moment_of, past_of
from kvmesh.runtime.prefill_attempt import PrefillAttempt
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.transfer.alignment import align_chosen, align_to_reservation
from kvmesh.transfer.channel_pool import ChannelPool
from kvmesh.transfer.frames import BlockPart


class Handover:
    """Sends prompts' KV to the workers that reserved room for it.

    Args:
        mode: transfer mode of all requests; None lets the policy choose for each request.
    """

    def __init__(
        self, parts: WorkerParts, channels: ChannelPool, mode: TransferMode | None
    ) -> None:
        self._core = parts.core
        self._block_bytes = parts.core.spec.layout.block_bytes
        self._stages = parts.core.spec.stages
        self._state_bytes = parts.core.spec.groups.state_blocks * self._block_bytes
        self._moment, self._is_past = moment_of(parts.memory), past_of(parts.memory)
        self._clock = parts.clock
        self._channels = channels
        self._mode = mode

    def choose_way(self, attempt: PrefillAttempt) -> None:
        """Chooses the transfer mode. Call it before the engine plans the first step."""
        attempt.mode = self._choose_mode(attempt)
        assert attempt.sequence is not None
        # Queries for a remote prefix may fail in any layer, when earlier layers would have been
        # sent.
        if attempt.mode is TransferMode.LAYERED and attempt.sequence.remote is None:
            attempt.watch_layers(self._moment)

    def _choose_mode(self, attempt: PrefillAttempt) -> TransferMode:
        if attempt.is_part:
            return TransferMode.LAYERED
        assert attempt.sequence is not None
        if attempt.sequence.ends_after_next:
            return TransferMode.WHOLE  # after the first token, so nothing is sent
        if self._mode is not None:
            return self._mode
        sequence, reservation = attempt.sequence, attempt.reservation
        assert sequence is not None
        todo = len(sequence.spec.token_ids) - sequence.num_cached
        num_chunks = 1 if sequence.is_part else -(-todo // self._core.max_step_tokens)
        last_tokens = todo - (num_chunks - 1) * self._core.max_step_tokens
        num_bytes = reservation.num_blocks * self._block_bytes
        # A state is complete only after the last chunk.
        kv_bytes = num_bytes - self._state_bytes
        task = TransferTask(
            num_bytes=num_bytes,
            num_chunks=num_chunks,
            last_bytes=kv_bytes * last_tokens // max(todo, 1) + self._state_bytes,
        )
        decision = choose_transfer_mode(task, self._channels.link_view(reservation))
        attempt.span.event("transfer_mode", mode=decision.mode.value, reason=decision.reason)
        return decision.mode

    async def run(self, attempt: PrefillAttempt) -> None:
        """Sends blocks as they are computed; commits and sends the rest after the first token.

        Raises:
            RefusedError: the receiver does not take them, or no longer does.
            LostError: the receiver, or the connection to it, is gone.
        """
        sequence = attempt.sequence
        assert sequence is not None
        sent = 0
        while attempt.first is None:
            await attempt.progress.wait()
            attempt.progress.clear()
            if attempt.first is None and attempt.mode is not TransferMode.WHOLE:
                attempt.span.event("chunk", computed_tokens=sequence.num_computed)
                sent = await self._send(attempt, sent)
                await self._send_layers(attempt, sent)
        if attempt.first.finish_reason is not None:
            return
        # Together, so that the receiver knows the first token when the last block arrives.
        committed, is_sent = await asyncio.gather(
            self._commit(attempt), self._send_rest(attempt, sent), return_exceptions=True
        )
        for error in (is_sent, committed):
            if error is not None:
                raise error

    async def _commit(self, attempt: PrefillAttempt) -> None:
        assert attempt.sequence is not None
        assert attempt.first is not None
        num_tokens = len(attempt.sequence.spec.token_ids)
        await self._channels.commit(attempt.reservation, attempt.first.token_id, num_tokens)

    async def _send_rest(self, attempt: PrefillAttempt, begin: int) -> None:
        """Sends what is not sent after the first token; `begin` is the next block to send."""
        if attempt.layers.num_sent:
            attempt.layers.computed(len(self._stages), self._moment())
            await self._send_layers(attempt, begin)
        else:
            await self._send(attempt, begin)

    async def _send_layers(self, attempt: PrefillAttempt, begin: int) -> None:
        """Sends the stages that are computed and not sent of all blocks from `begin` on."""
        layers, reservation = attempt.layers, attempt.reservation
        assert attempt.sequence is not None
        while (ready := layers.next(self._is_past)) is not None:
            if attempt.sequence.state is SequenceState.GONE:
                return  # the first token was the last one, so no decode needs the rest
            end, after = ready
            arriving = self._core.arriving_blocks(attempt.sequence, reservation.num_cached_blocks)
            for stage in joined(self._stages[layers.num_sent : end]):
                indexes = [i for i in range(begin, len(arriving)) if arriving[i].kind == stage.kind]
                if not indexes:
                    continue  # a window that begins after the blocks that the receiver lacks
                blocks = [arriving[index].block for index in indexes]
                runs = align_chosen(blocks, indexes, reservation.run_lengths)
                part = BlockPart(stage.offset, stage.size)
                started = self._clock.now()
                try:
                    with self._core.pool.held(blocks):  # they may be given back meanwhile
                        await self._channels.put(reservation, runs, part, after)
                except RefusedError:
                    if attempt.sent_parts:
                        raise
                    layers.is_refused = True  # a receiver that takes blocks whole; they follow
                    return
                attempt.sent_parts += 1
                attempt.sending_s += self._clock.now() - started
                attempt.sent_bytes += len(blocks) * part.size
                attempt.sent_calls += len(blocks)
            layers.num_sent = end

    async def _send(self, attempt: PrefillAttempt, begin: int) -> int:
        """Sends the complete blocks from `begin` on in one call. Returns the next block to send."""
        sequence, reservation = attempt.sequence, attempt.reservation
        assert sequence is not None
        arriving = self._core.arriving_blocks(sequence, reservation.num_cached_blocks)
        end = sum(each.tokens <= sequence.num_computed for each in arriving)
        if end <= begin:
            return begin
        blocks = [each.block for each in arriving[begin:end]]
        runs = align_to_reservation(blocks, begin, reservation.run_lengths)
        started = self._clock.now()
        with self._core.pool.held(blocks):  # the sequence may be preempted meanwhile
            await self._channels.put(reservation, runs)
        attempt.sending_s += self._clock.now() - started
        attempt.sent_bytes += (end - begin) * self._block_bytes
        attempt.sent_calls += len(runs)
        return end
