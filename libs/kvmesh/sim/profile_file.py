"""Reads and checks profiles in JSON: those shipped with the package, and those of `kvmesh profile`.

Tests: tests/unit/sim/test_profile.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from kvmesh.core.errors import ConfigError
from kvmesh.policy.curves import Curve, Interpolated, Quadratic
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.fields import Fields
from kvmesh.sim.profile import (
    DecodeCost,
    Device,
    Front,
    Links,
    Loop,
    PlanDefaults,
    Profile,
    Sharing,
    gbps,
)


def shipped_profiles() -> list[str]:
    """Returns the names of the profiles that come with the package."""
    folder = resources.files("kvmesh.sim.profiles")
    return sorted(
        e.name.removesuffix(".json") for e in folder.iterdir() if e.name.endswith(".json")
    )


def load_profile(name_or_path: str) -> Profile:
    """Reads a shipped profile by name, or any other by path.

    Raises:
        ConfigError: there is no such profile, or an entry is wrong.
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
    # `measured` holds the measurements behind the costs of `kvmesh profile`, for people.
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
    fields.only("prefill", "decode", "front", "loop", *_USED_CORES)
    front = _front(fields.child("front")) if fields.has("front") else None
    loop = _loop(fields.child("loop")) if fields.has("loop") else None
    cores = {name: fields.number(name) for name in _USED_CORES if fields.has(name)}
    found = Sharing(fields.number("prefill"), fields.number("decode"), front, loop, **cores)
    if min(found.prefill, found.decode) < 1:
        raise ConfigError(f"{fields.path}: workers cannot compute faster beside others: {found}")
    for name, value in cores.items():
        if not 0 < value <= 1:
            raise ConfigError(f"{fields.path}: {name} are more than 0 and at most 1: {found}")
    return found


def _loop(fields: Fields) -> Loop:
    return Loop(**_costs(fields, ("prompt_s", "decode_s", "ask_s"), _LOOP_MORE))


def _front(fields: Fields) -> Front:
    found = Front(**_costs(fields, ("cores", "request_s", "token_s", "ask_s"), _FRONT_MORE))
    if found.cores <= 0:
        raise ConfigError(f"{fields.path}: cores are more than 0: {found}")
    return found


_USED_CORES = ("step_cores", "prompt_cores")
_LOOP_MORE = ("prompt_token_s", "decode_token_s", "step_cores")
_FRONT_MORE = ("prompt_token_s", "idle_cores")
"""Entries that files of earlier versions do not have."""


def _costs(fields: Fields, names: Sequence[str], more: Sequence[str]) -> dict[str, float]:
    fields.only(*names, *more)
    present = [*names, *(name for name in more if fields.has(name))]
    found = {name: fields.number(name) for name in present}
    if min(found.values()) < 0:
        raise ConfigError(f"{fields.path}: times are not negative: {found}")
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
    known = ("prefill_s", "decode_s", "num_blocks", "prefill_slots", "decode_slots", "spread")
    fields.only(*known)
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
        spread=fields.number("spread") if fields.has("spread") else 0.0,
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
