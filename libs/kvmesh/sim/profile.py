"""Measured costs of a model on its hardware, read from JSON; the papers' numbers ship with us.

Tests: tests/unit/sim/test_profile.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvmesh.core.errors import ConfigError
from kvmesh.policy.curves import Curve, Interpolated, Quadratic
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.prfaas import ServingProfile
from kvmesh.sim.fields import Fields

BITS_PER_GBPS = 1e9


def gbps(value: float) -> float:
    """Gbit/s in bytes per second."""
    return value * BITS_PER_GBPS / 8


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


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("kvmesh.sim.profiles")
    return sorted(
        e.name.removesuffix(".json") for e in folder.iterdir() if e.name.endswith(".json")
    )


def load_profile(name_or_path: str) -> Profile:
    """Reads a shipped profile by name, or any other by path.

    Raises:
        ConfigError: there is none, or an entry is wrong.
    """
    if name_or_path in shipped_profiles():
        raw = resources.files("kvmesh.sim.profiles").joinpath(f"{name_or_path}.json").read_bytes()
    else:
        try:
            raw = Path(name_or_path).read_bytes()
        except OSError as error:
            known = ", ".join(shipped_profiles())
            raise ConfigError(
                f"{name_or_path} is neither a file ({error.strerror}) nor one of {known}"
            ) from error
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name_or_path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{name_or_path}: a profile is a JSON object")
    return parse_profile(Fields(data, name_or_path))


def parse_profile(fields: Fields) -> Profile:
    """Checks a parsed profile; raises ConfigError with the path of a wrong entry."""
    # `measured` is what `kvmesh profile` fitted the costs to, for people.
    known = ("name", "description", "kv_bytes", "devices", "links", "plan", "sharing", "measured")
    fields.only(*known)
    devices = {name: _device(name, each) for name, each in fields.children("devices").items()}
    plan = _plan(fields.child("plan"))
    for name in (plan.remote, plan.local):
        if name not in devices:
            raise ConfigError(f"{fields.path}.plan: there is no device {name!r}")
    links = fields.child("links")
    links.only("inside_gbps", "between_gbps", "latency_s")
    return Profile(
        name=fields.text("name"),
        description=fields.text("description"),
        kv_bytes=_curve(fields.child("kv_bytes")),
        devices=devices,
        links=Links(
            gbps(links.number("inside_gbps")),
            gbps(links.number("between_gbps")),
            links.number("latency_s"),
        ),
        plan=plan,
        sharing=_sharing(fields.child("sharing")) if fields.has("sharing") else None,
    )


def _sharing(fields: Fields) -> Sharing:
    fields.only("prefill", "decode", "front", "loop")
    front = _front(fields.child("front")) if fields.has("front") else None
    loop = _loop(fields.child("loop")) if fields.has("loop") else None
    found = Sharing(fields.number("prefill"), fields.number("decode"), front, loop)
    if min(found.prefill, found.decode) < 1:
        raise ConfigError(f"{fields.path}: nobody computes faster beside others: {found}")
    return found


def _loop(fields: Fields) -> Loop:
    names = ("prompt_s", "decode_s", "ask_s")
    fields.only(*names)
    found = Loop(*(fields.number(name) for name in names))
    if min(found.prompt_s, found.decode_s, found.ask_s) < 0:
        raise ConfigError(f"{fields.path}: times are not negative: {found}")
    return found


def _front(fields: Fields) -> Front:
    names = ("cores", "request_s", "token_s", "ask_s")
    fields.only(*names)
    found = Front(*(fields.number(name) for name in names))
    if found.cores <= 0 or min(found.request_s, found.token_s, found.ask_s) < 0:
        raise ConfigError(f"{fields.path}: cores are more than 0, times not negative: {found}")
    return found


def _curve(fields: Fields) -> Curve:
    fields.only("points", "quadratic")
    try:
        if fields.has("points"):
            pairs = fields.array("points")
            return Interpolated(tuple((float(length), float(value)) for length, value in pairs))
        return Quadratic(*(float(each) for each in fields.array("quadratic")))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{fields.path}: {error}") from error


def _device(name: str, fields: Fields) -> Device:
    fields.only("prefill_s", "decode_s", "num_blocks", "prefill_slots", "decode_slots")
    decode = fields.child("decode_s")
    decode.only("constant", "per_sequence", "per_token")
    return Device(
        name=name,
        prefill_s=_curve(fields.child("prefill_s")),
        decode=DecodeCost(
            decode.number("constant"), decode.number("per_sequence"), decode.number("per_token")
        ),
        num_blocks=fields.count("num_blocks", 1),
        prefill_slots=fields.count("prefill_slots", 1),
        decode_slots=fields.count("decode_slots", 1),
    )


def _plan(fields: Fields) -> PlanDefaults:
    fields.only(
        "remote",
        "local",
        "num_remote",
        "num_local",
        "decode_batch",
        "decode_step_s",
        "output_tokens",
        "lengths",
    )
    lengths = fields.child("lengths")
    lengths.only("mu", "sigma", "min", "max")
    try:
        distribution = LengthDistribution.log_normal(
            lengths.number("mu"),
            lengths.number("sigma"),
            lengths.number("min"),
            lengths.number("max"),
        )
    except ValueError as error:
        raise ConfigError(f"{lengths.path}: {error}") from error
    return PlanDefaults(
        remote=fields.text("remote"),
        local=fields.text("local"),
        num_remote=fields.count("num_remote"),
        num_local=fields.count("num_local", 1),
        decode_batch=fields.number("decode_batch"),
        decode_step_s=fields.number("decode_step_s"),
        output_tokens=fields.number("output_tokens"),
        lengths=distribution,
    )
