"""Measures how fast a fleet prefills and decodes, from the totals that its workers report.

Speeds and lengths are measured; the shape of prefill time over the length is that of the offline
profile (PrfaaS 3.4.3 point 1), or of the workers' attention where there is no profile.
Tests: tests/unit/policy/test_measurement.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.core.details import FleetWorker
from kvmesh.core.kv_groups import PLAIN, KvGroups
from kvmesh.core.turns import Parts, is_turn_over
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.curves import Curve, Quadratic, Scaled
from kvmesh.policy.prfaas import ServingProfile

KEEP = 0.98
"""Factor on the weight of older samples per cycle: with a cycle per second about the last minute
counts."""

MIN_BUSY_S = 1.0
"""Minimum seconds of work for a measurement of speed."""


MAX_LENGTHS = 256
"""Number of the latest prompts whose lengths give a measured speed its curve."""


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of a prompt's KV that a decode worker takes, by its tokens: known from its layout."""

    groups: KvGroups
    block_bytes: int
    block_size: int

    def __call__(self, length: float) -> float:
        """Returns the bytes of `length` tokens."""
        return self.block_bytes * self.groups.handed_off(length, self.block_size)


REACH = 4.0
"""A measured speed tells of prompts up to this multiple of the mean length."""


@dataclass(slots=True)
class _Speed:
    """Number of tokens and their busy time, both with exponential forgetting.

    Attributes:
        pair_share: see `ModelRunner.pair_share`, of the workers.
        lengths: uncached tokens of the latest prompts.
    """

    tokens: float = 0.0
    busy_s: float = 0.0
    pair_share: float = 0.0
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_LENGTHS))

    def fade(self) -> None:
        self.tokens *= KEEP
        self.busy_s *= KEEP

    @property
    def token_s(self) -> float | None:
        """Seconds per token; None while unknown."""
        return self.busy_s / self.tokens if self.busy_s >= MIN_BUSY_S and self.tokens else None

    def prefill_s(self, token_s: float, profiled: Curve | None) -> Curve:
        """Seconds of a prompt by its uncached tokens.

        Args:
            token_s: measured seconds per token, for the mean of the latest lengths.
            profiled: gives the curve its shape; None: token and attention costs of the workers.
        """
        shape = profiled or Quadratic(0.0, 1.0, self.pair_share / 2)
        lengths = self.lengths or (1,)
        return Scaled(shape, token_s * sum(lengths) / sum(shape(each) for each in lengths))


class MeanAnswer:
    """Mean number of tokens that a request generates: recent tokens over recent requests.

    The scheduler and the simulator both estimate answers with it, since neither knows how long a
    new request's answer will be.
    """

    def __init__(self) -> None:
        self._generated = self._requests = 0.0

    def observe(self, num_generated: int, num_requests: int) -> None:
        """Adds one cycle: the tokens that all workers generated, and the requests routed."""
        self._generated = self._generated * KEEP + num_generated
        self._requests = self._requests * KEEP + num_requests

    @property
    def tokens(self) -> float | None:
        """Mean tokens generated per request; None while unknown."""
        return self._generated / self._requests if self._requests >= 1 else None

    def expected(self, most: float) -> float:
        """Returns the tokens that a request is expected to generate, `most` at most."""
        return most if self.tokens is None else min(self.tokens, most)


class ServingMeter:
    """Measures one model's workers.

    Args:
        remote: name of the offload cluster.
        expected: the operator's profile; None: there is none.

    Attributes:
        answers: mean length of answers.
    """

    def __init__(self, remote: str, expected: ServingProfile | None = None) -> None:
        self._remote = remote
        self._expected = expected
        self._seen: dict[WorkerId, tuple[int, int, int]] = {}
        self._far, self._near, self._decode = _Speed(), _Speed(), _Speed()
        self._batch_s = 0.0
        self.answers = MeanAnswer()
        self._slots = 0
        self._kv_bytes = KvBytes(PLAIN, 0, 1)

    def note_prompt(self, uncached_tokens: int, *, is_far: bool) -> None:
        """Adds the length of a prompt that was routed for the first time.

        Args:
            is_far: whether the remote cluster computes it.
        """
        (self._far if is_far else self._near).lengths.append(max(uncached_tokens, 1))

    def observe(
        self, workers: Sequence[FleetWorker], num_requests: int, elapsed_s: float
    ) -> Parts[None]:
        """Adds the loads of one cycle.

        Args:
            workers: all workers of the model.
            num_requests: number of requests routed since the last cycle.
            elapsed_s: seconds since the last cycle.
        """
        for speed in (self._far, self._near, self._decode):
            speed.fade()
        self._batch_s *= KEEP
        # Routes read the mean length of answers meanwhile, so both of its parts change at the end.
        generated = 0
        before, self._seen = self._seen, {}
        for number, worker in enumerate(workers):
            if is_turn_over(number):
                yield
            if not worker.reported:
                continue
            info, load = worker.info, worker.load
            now = (info.incarnation, load.prefill_tokens_total, load.decode_tokens_total)
            self._seen[info.worker_id] = now
            last = before.get(info.worker_id)
            if last is not None and last[0] == info.incarnation:
                generated += now[2] - last[2]
                self._add(worker, now[1] - last[1], now[2] - last[2], elapsed_s)
        self.answers.observe(generated, num_requests)

    def _add(self, worker: FleetWorker, computed: int, generated: int, elapsed_s: float) -> None:
        info, load = worker.info, worker.load
        self._slots = info.decode_slots
        self._kv_bytes = KvBytes(info.groups, info.layout.block_bytes, info.layout.block_size)
        # Each generated token but the first of a prompt was also computed.
        prompts = max(computed - generated, 0)
        speed = self._far if info.cluster == self._remote else self._near
        if info.role is not Role.DECODE and prompts:
            speed.pair_share = info.pair_share
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
    def reach_tokens(self) -> float:
        """Tokens of the longest prompt of which `prompt_token_s` tells."""
        lengths = self._near.lengths or self._far.lengths
        return REACH * sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def serving(self) -> ServingProfile | None:
        """The profile for the throughput model; None until prefill and decode were both measured.

        A decode step is assumed no longer in a full batch.
        """
        near, decode_s = self._near.token_s, self._decode.token_s
        output_tokens = self.answers.tokens
        if near is None or decode_s is None or output_tokens is None:
            return None
        batch = self._batch_s / self._decode.busy_s
        profile = self._expected
        near_shape = None if profile is None else profile.local_prefill_s
        far_shape = None if profile is None else profile.remote_prefill_s
        local_s = self._near.prefill_s(near, near_shape)
        if self._far.token_s is not None:
            far_s = self._far.prefill_s(self._far.token_s, far_shape)
        else:
            far_s = far_shape or local_s
        return ServingProfile(
            remote_prefill_s=far_s,
            local_prefill_s=local_s,
            kv_bytes=self._kv_bytes,
            decode_batch=self._slots,
            decode_step_s=decode_s * batch,
            output_tokens=max(output_tokens, 1.0),
        )
