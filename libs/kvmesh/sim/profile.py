"""Measured costs of a model on its hardware; `profile_file.py` reads them from JSON.

Tests: tests/unit/sim/test_profile.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmesh.policy.curves import Curve
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.prfaas import ServingProfile

BITS_PER_GBPS = 1e9


def gbps(value: float) -> float:
    """Returns Gbit/s as bytes per second."""
    return value * BITS_PER_GBPS / 8


TYPICAL_TOKENS = 8192
"""A prompt length whose mean costs stand for all in the inputs of routes."""

_SHORT, _LONG = 4096, 32_768
"""Two prompt lengths whose times give attention's part of prefill."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a decode step: `constant + per_sequence * B + per_token * tokens of context`."""

    constant: float
    per_sequence: float
    per_token: float

    def step_s(self, num_sequences: float, context_tokens: float) -> float:
        """Returns the seconds of one step of a batch."""
        return self.constant + self.per_sequence * num_sequences + self.per_token * context_tokens


@dataclass(frozen=True, slots=True)
class Device:
    """One instance of a type of hardware.

    Attributes:
        prefill_s: seconds to prefill a prompt of which nothing is cached, by its tokens.
        num_blocks: number of KV blocks that it holds, of 512 tokens as in traces.
        spread: relative deviation of the time of equal work from run to run.
    """

    name: str
    prefill_s: Curve
    decode: DecodeCost
    num_blocks: int
    prefill_slots: int
    decode_slots: int
    spread: float = 0.0

    def chunk_s(self, begin: int, end: int, *, is_first: bool) -> float:
        """Returns the seconds to compute a prompt's tokens from `begin` to `end`.

        They attend to all tokens before them, cached or not.

        Args:
            is_first: whether the fixed cost of a prompt is part of it.
        """
        fixed_s = self.prefill_s(0) if is_first else 0.0
        return self.prefill_s(end) - self.prefill_s(begin) + fixed_s

    @property
    def pair_share(self) -> float:
        """Work of attention to one position, as a fraction of a token's other work; never 0."""
        short, long = (self.prefill_s(length) / length for length in (_SHORT, _LONG))
        square = max((long - short) / (_LONG - _SHORT), 0.0)
        linear = max(short - square * _SHORT, 1e-12)
        return max(2 * square / linear, 1e-9)


@dataclass(frozen=True, slots=True)
class Links:
    """Links between instances.

    Attributes:
        inside_bytes_per_s: bandwidth of each instance inside its cluster.
        between_bytes_per_s: bandwidth out of a cluster to the others, shared by its instances.
        latency_s: seconds of a control message.
    """

    inside_bytes_per_s: float
    between_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class PlanDefaults:
    """Defaults of `kvmesh plan`.

    Attributes:
        remote, local: names of devices.
    """

    remote: str
    local: str
    num_remote: int
    num_local: int
    decode_batch: float
    decode_step_s: float
    output_tokens: float
    lengths: LengthDistribution


@dataclass(frozen=True, slots=True)
class Front:
    """Processor time that gateway, scheduler and client take on the host of the workers.

    Attributes:
        cores: number of cores of the host.
        request_s: seconds per request, without its tokens.
        token_s: seconds per token sent to the client.
        ask_s: seconds per refused offer; a waiting request makes many.
        prompt_token_s: seconds per token of a prompt.
        idle_cores: cores that they take while nobody asks.
    """

    cores: float
    request_s: float
    token_s: float
    ask_s: float
    prompt_token_s: float = 0.0
    idle_cores: float = 0.0


@dataclass(frozen=True, slots=True)
class Loop:
    """Time of a worker's event loop outside steps, during which its next step waits.

    Attributes:
        prompt_s: seconds per prompt that it accepts and hands off.
        decode_s: seconds per request that it reserves for and decodes, without its steps.
        ask_s: seconds per request that it refuses.
        prompt_token_s, decode_token_s: further seconds of the first two per token of the prompt.
        step_cores: cores that it uses while the worker is in decode steps.
    """

    prompt_s: float
    decode_s: float
    ask_s: float
    prompt_token_s: float = 0.0
    decode_token_s: float = 0.0
    step_cores: float = 0.0


class Work(enum.Enum):
    """Kinds of work of a worker's engine."""

    STEPS = "decode steps"
    PROMPT = "chunks of prompts, with or without decode steps"


@dataclass(frozen=True, slots=True)
class Sharing:
    """Costs of workers that share the cores of one host.

    Attributes:
        prefill: factor on the time of a prompt's chunk for each other computing worker.
        decode: factor on the time of a decode step, likewise.
        front: processor time of gateway, scheduler and client there; None: negligible.
        loop: time of each worker's event loop; None: negligible.
        step_cores: cores that the thread of decode steps uses on a host of its own; the rest of
            the time it waits for the event loop.
        prompt_cores: cores that the engine uses while it computes prompts; hardly any if it
            computes them on a device.
    """

    prefill: float
    decode: float
    front: Front | None = None
    loop: Loop | None = None
    step_cores: float = 1.0
    prompt_cores: float = 1.0

    def cores_of(self, work: Work) -> float:
        """Number of cores that a worker uses on a host of its own."""
        return self.step_cores if work is Work.STEPS else self.prompt_cores


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on its hardware.

    Attributes:
        sharing: costs of sharing one host, if all workers are on one; None: each has its own.
    """

    name: str
    description: str
    kv_bytes: Curve
    devices: dict[str, Device]
    links: Links
    plan: PlanDefaults
    sharing: Sharing | None = None

    @property
    def token_bytes(self) -> float:
        """Bytes of a token's KV in a typical prompt."""
        return self.kv_bytes(TYPICAL_TOKENS) / TYPICAL_TOKENS

    @property
    def serving(self) -> ServingProfile:
        """The same costs in the form of the throughput model (PrfaaS 3.4.1)."""
        return ServingProfile(
            remote_prefill_s=self.devices[self.plan.remote].prefill_s,
            local_prefill_s=self.devices[self.plan.local].prefill_s,
            kv_bytes=self.kv_bytes,
            decode_batch=self.plan.decode_batch,
            decode_step_s=self.plan.decode_step_s,
            output_tokens=self.plan.output_tokens,
        )
