"""Measured costs of a model on its hardware; `profile_file.py` reads them.

Tests: tests/unit/sim/test_profile.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.policy.curves import Curve
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.prfaas import ServingProfile

BITS_PER_GBPS = 1e9


def gbps(value: float) -> float:
    """Gbit/s in bytes per second."""
    return value * BITS_PER_GBPS / 8


_SHORT, _LONG = 4096, 32_768
"""Two prompts whose times tell how much of them is attention."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a decode step: `constant + per_sequence * B + per_token * tokens of context`."""

    constant: float
    per_sequence: float
    per_token: float

    def step_s(self, num_sequences: float, context_tokens: float) -> float:
        """Time of one step of a batch."""
        return self.constant + self.per_sequence * num_sequences + self.per_token * context_tokens


@dataclass(frozen=True, slots=True)
class Device:
    """One instance of a kind of hardware.

    Attributes:
        prefill_s: of so many uncached tokens.
        num_blocks: KV blocks that it holds, of 512 tokens as in traces.
    """

    name: str
    prefill_s: Curve
    decode: DecodeCost
    num_blocks: int
    prefill_slots: int
    decode_slots: int

    @property
    def pair_share(self) -> float:
        """Attention to one position, as a share of a token's other work; never 0."""
        short, long = (self.prefill_s(length) / length for length in (_SHORT, _LONG))
        square = max((long - short) / (_LONG - _SHORT), 0.0)
        linear = max(short - square * _SHORT, 1e-12)
        return max(2 * square / linear, 1e-9)


@dataclass(frozen=True, slots=True)
class Links:
    """Ways of KV between instances.

    Attributes:
        inside_bytes_per_s: of each instance, inside its cluster.
        between_bytes_per_s: from one cluster to another, shared by all its instances.
        latency_s: of a control message.
    """

    inside_bytes_per_s: float
    between_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class PlanDefaults:
    """What `kvmesh plan` starts from.

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
        cores: of the host.
        request_s: of a request, its tokens apart.
        token_s: of a token on its way to the client.
        ask_s: of a worker that is asked and refuses; who waits asks again and again.
    """

    cores: float
    request_s: float
    token_s: float
    ask_s: float


@dataclass(frozen=True, slots=True)
class Loop:
    """Time that a worker takes for what is no step, while its next step waits.

    Attributes:
        prompt_s: of a prompt that it takes and hands over.
        decode_s: of a request that it reserves for and decodes, its steps apart.
        ask_s: of a request that it refuses.
    """

    prompt_s: float
    decode_s: float
    ask_s: float


@dataclass(frozen=True, slots=True)
class Sharing:
    """What it costs workers to be on one host and share its cores.

    Attributes:
        prefill: a chunk of a prompt takes so many times as long for each other worker that
            computes.
        decode: a decode step does.
        front: what else computes there; None is nothing that matters.
        loop: of each worker; None is nothing that matters.
    """

    prefill: float
    decode: float
    front: Front | None = None
    loop: Loop | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on its hardware.

    Attributes:
        sharing: of all workers, which are on one host then; None gives each a host of its own.
    """

    name: str
    description: str
    kv_bytes: Curve
    devices: dict[str, Device]
    links: Links
    plan: PlanDefaults
    sharing: Sharing | None = None

    @property
    def serving(self) -> ServingProfile:
        """The throughput model's view."""
        return ServingProfile(
            remote_prefill_s=self.devices[self.plan.remote].prefill_s,
            local_prefill_s=self.devices[self.plan.local].prefill_s,
            kv_bytes=self.kv_bytes,
            decode_batch=self.plan.decode_batch,
            decode_step_s=self.plan.decode_step_s,
            output_tokens=self.plan.output_tokens,
        )
