"""Measures how fast a fleet prefills and decodes, from the totals that its workers report.

Stands in for the offline profile of PrfaaS 3.4.3 point 1.
Tests: tests/unit/policy/test_measurement.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.prfaas import ServingProfile

KEEP = 0.98
"""Factor on the weight of older samples per cycle: with a cycle per second about the last minute
counts."""

MIN_BUSY_S = 1.0
"""Minimum seconds of work for a measurement of speed."""


@dataclass(slots=True)
class _Speed:
    """Number of tokens and their busy time, both with exponential forgetting."""

    tokens: float = 0.0
    busy_s: float = 0.0

    def fade(self) -> None:
        self.tokens *= KEEP
        self.busy_s *= KEEP

    @property
    def token_s(self) -> float | None:
        """Seconds per token; None while unknown."""
        return self.busy_s / self.tokens if self.busy_s >= MIN_BUSY_S and self.tokens else None


class ServingMeter:
    """Measures one model's workers.

    Args:
        remote: name of the offload cluster.
    """

    def __init__(self, remote: str) -> None:
        self._remote = remote
        self._seen: dict[WorkerId, tuple[int, int, int]] = {}
        self._far, self._near, self._decode = _Speed(), _Speed(), _Speed()
        self._batch_s = 0.0
        self._generated = self._requests = 0.0
        self._slots = 0
        self._token_bytes = 0.0

    def observe(self, workers: Iterable[FleetWorker], num_requests: int, elapsed_s: float) -> None:
        """Adds the loads of one cycle.

        Args:
            workers: all workers of the model.
            num_requests: number of requests routed since the last cycle.
            elapsed_s: seconds since the last cycle.
        """
        for speed in (self._far, self._near, self._decode):
            speed.fade()
        self._batch_s *= KEEP
        self._generated *= KEEP
        self._requests = self._requests * KEEP + num_requests
        before, self._seen = self._seen, {}
        for worker in workers:
            if not worker.reported:
                continue
            info, load = worker.info, worker.load
            now = (info.incarnation, load.prefill_tokens_total, load.decode_tokens_total)
            self._seen[info.worker_id] = now
            last = before.get(info.worker_id)
            if last is not None and last[0] == info.incarnation:
                self._add(worker, now[1] - last[1], now[2] - last[2], elapsed_s)

    def _add(self, worker: FleetWorker, computed: int, generated: int, elapsed_s: float) -> None:
        info, load = worker.info, worker.load
        self._slots = info.decode_slots
        self._token_bytes = info.layout.block_bytes / info.layout.block_size
        self._generated += generated
        # Each generated token but the first of a prompt was also computed.
        prompts = max(computed - generated, 0)
        speed = self._far if info.cluster == self._remote else self._near
        if info.role is not Role.DECODE and prompts:
            speed.tokens += prompts
            speed.busy_s += load.compute_used * elapsed_s
        if load.memory_bandwidth_used and generated and load.decode_running:
            busy_s = load.memory_bandwidth_used * elapsed_s
            self._decode.tokens += generated
            self._decode.busy_s += busy_s
            self._batch_s += busy_s * load.decode_running

    @property
    def prompt_token_s(self) -> float | None:
        """Seconds to compute a prompt token at home, else remotely; None while unknown."""
        return self._near.token_s or self._far.token_s

    @property
    def output_tokens(self) -> float | None:
        """Mean tokens generated per request; None while unknown."""
        return self._generated / self._requests if self._requests >= 1 else None

    @property
    def serving(self) -> ServingProfile | None:
        """The profile for the throughput model; None until prefill and decode were both measured.

        Prefill time is assumed linear in its tokens, and a decode step no longer in a full batch.
        """
        near, decode_s = self._near.token_s, self._decode.token_s
        if near is None or decode_s is None or self.output_tokens is None:
            return None
        batch = self._batch_s / self._decode.busy_s
        return ServingProfile(
            remote_prefill_s=Quadratic(0.0, self._far.token_s or near),
            local_prefill_s=Quadratic(0.0, near),
            kv_bytes=Quadratic(0.0, self._token_bytes),
            decode_batch=self._slots,
            decode_step_s=decode_s * batch,
            output_tokens=max(self.output_tokens, 1.0),
        )
