"""Ablation and sensitivity of the default policy: goodput with each mechanism off, alone and with
the others, and with each constant halved and doubled.

Tests: tests/unit/benchmarks/test_policies_grid.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from benchmarks.policies_experiments import Experiment, Job, Outcome, Rows, Verdict
from benchmarks.policies_grid import OURS, Entrant, Limits, Load, run_cell, split, with_equal_rights
from kvmesh.policy import (
    fleet_index,
    forwarding,
    ranking,
    role_loop,
    role_switch,
    routing,
    seats,
    token_pace,
)
from kvmesh.sim.systems import SYSTEMS, System

Change = Callable[[System], System]

NEVER = 1e9


def _route(**changes: Any) -> Change:
    def change(system: System) -> System:
        return dataclasses.replace(system, route=dataclasses.replace(system.route, **changes))

    return change


def _fields(**changes: Any) -> Change:
    return lambda system: dataclasses.replace(system, **changes)


_Constant = tuple[ModuleType, str]
_Off = tuple[Change | None, Mapping[_Constant, float]]

MECHANISMS: Mapping[str, _Off] = {
    "decode workers help": (None, {(routing, "HELP_SLOWDOWN"): NEVER}),
    "short prompts stay": (_route(aggregate_tokens=-1), {}),
    "role switches": (_fields(switch_roles=False), {}),
    "reallocation": (_fields(reallocate=False), {}),
    "prefixes are fetched": (_route(fetches=False), {}),
    "waiting for a holder": (_route(slack_tokens=math.inf), {}),
    "decode by prefix": (None, {(ranking, "DECODE_CACHE_WEIGHT"): 0.0}),
    "limits per token": (_fields(knows_tpot=False), {}),
    "late prompts give way": (_fields(refuses_late=False), {}),
}
"""How each is taken away."""

CONSTANTS: Mapping[str, tuple[_Constant, ...]] = {
    "BEARABLE_MISSES": ((token_pace, "BEARABLE_MISSES"),),
    "PROMPT_SHARE": ((token_pace, "PROMPT_SHARE"),),
    "HELP_SHARE": ((ranking, "HELP_SHARE"),),
    "HELP_SLOWDOWN": ((routing, "HELP_SLOWDOWN"),),
    "AGGREGATE_SHARE": ((ranking, "AGGREGATE_SHARE"),),
    "TRANSFER_SHARE": ((routing, "TRANSFER_SHARE"),),
    "BUSY_TOKENS": ((ranking, "BUSY_TOKENS"), (fleet_index, "BUSY_TOKENS")),
    "DECODE_CACHE_WEIGHT": ((ranking, "DECODE_CACHE_WEIGHT"),),
    "SCORE_WINDOW_S": ((role_loop, "SCORE_WINDOW_S"),),
    "REROUTE_AFTER_S": ((forwarding, "REROUTE_AFTER_S"),),
    "MAX_BACKOFF_S": ((forwarding, "MAX_BACKOFF_S"),),
    "SILENT_AFTER_S": ((seats, "SILENT_AFTER_S"),),
}
"""Constants of the default's decisions, where they are read."""

LIMIT_FIELDS = ("idle", "needy", "settled", "cycles", "rest_cycles", "margin")
"""Of `role_switch.SwitchLimits`, whose defaults are constants too."""

FACTORS = (0.5, 2.0)


@contextlib.contextmanager
def constants(changes: Mapping[_Constant, object]) -> Iterator[None]:
    """Gives module constants other values for the length of a run."""
    before = {(module, name): getattr(module, name) for module, name in changes}
    try:
        for (module, name), value in changes.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def without(names: Sequence[str]) -> tuple[System, dict[_Constant, object]]:
    """The default without some of its mechanisms, and the constants that this takes."""
    system, changes = with_equal_rights(SYSTEMS[OURS]), dict[_Constant, object]()
    for name in names:
        change, others = MECHANISMS[name]
        system = change(system) if change is not None else system
        changes |= others
    return system, changes


@dataclass(frozen=True, slots=True)
class _Variant:
    """The default with some mechanisms off, other constants, and one change of the system."""

    off: Sequence[str] = ()
    changes: Mapping[_Constant, object] = field(default_factory=dict)
    change: Change = _fields()


def _run(variant: _Variant, cells: Sequence[tuple[Load, Limits]]) -> Outcome:
    system, own = without(variant.off)
    system = variant.change(system)
    with constants({**own, **variant.changes}):
        found = [run_cell(Entrant(OURS, system, split(6)), *cell).row for cell in cells]
    row = {
        f"{each['trace']} {each['rate']:g}/s {limits}": each["goodput/s"]
        for each, (_, limits) in zip(found, cells, strict=True)
    }
    return Outcome(row)


def over_first(rows: Rows) -> dict[str, list[float]]:
    """Goodput of each variant over that of the first one, cell by cell."""
    first = next(iter(rows.values()))
    return {
        label: [max(row[cell], 1e-9) / max(value, 1e-9) for cell, value in first.items()]
        for label, row in rows.items()
    }


def _judge(rows: Rows) -> Verdict:
    """Says which variants are better than the default, if any."""
    means = {name: statistics.geometric_mean(each) for name, each in over_first(rows).items()}
    better = [f"{name} {mean:.3f}" for name, mean in means.items() if mean > 1.01]
    return Verdict([], [f"better than the default by more than 1 %: {', '.join(better) or 'none'}"])


def ablation(cells: Sequence[tuple[Load, Limits]]) -> Experiment:
    """Each mechanism off, each one alone, all and none."""
    name = "Ablation"
    every = list(MECHANISMS)
    variants = {"all": _Variant()}
    variants |= {f"without: {each}": _Variant([each]) for each in every}
    for each in every:
        variants[f"only: {each}"] = _Variant([other for other in every if other != each])
    variants["none"] = _Variant(every)
    return Experiment(name, _jobs(name, variants, cells), _judge)


def sensitivity(cells: Sequence[tuple[Load, Limits]]) -> Experiment:
    """Each constant halved and doubled."""
    name = "Sensitivity"
    variants = {"as it is": _Variant()}
    for constant, places in CONSTANTS.items():
        for factor in FACTORS:
            scaled = {place: scaled_number(getattr(*place), factor) for place in places}
            variants[f"{constant} x{factor:g}"] = _Variant(changes=scaled)
    for factor in FACTORS:  # a field of the policy has its value already
        slack = _route(slack_tokens=ranking.SLACK_TOKENS * factor)
        variants[f"SLACK_TOKENS x{factor:g}"] = _Variant(change=slack)
    kept = token_pace.KEPT_SHARE
    for share in (kept - 0.2, kept + 0.1):  # twice 0.9 is no share
        changed = {(token_pace, "KEPT_SHARE"): share}
        variants[f"KEPT_SHARE {share:g}"] = _Variant(changes=changed)
    limits = role_switch.SwitchLimits()
    for each in LIMIT_FIELDS:
        for factor in FACTORS:
            value = scaled_number(getattr(limits, each), factor)
            made = partial(_same, dataclasses.replace(limits, **{each: value}))
            changed_limits = {(role_loop, "SwitchLimits"): made}
            variants[f"SwitchLimits.{each} x{factor:g}"] = _Variant(changes=changed_limits)
    return Experiment(name, _jobs(name, variants, cells), _judge)


def scaled_number(value: Any, factor: float) -> Any:
    """A number of the same type: compiled code takes no other."""
    return type(value)(value * factor)


def _same(limits: role_switch.SwitchLimits) -> role_switch.SwitchLimits:
    return limits


def _jobs(
    name: str, variants: Mapping[str, _Variant], cells: Sequence[tuple[Load, Limits]]
) -> list[Job]:
    weight = sum(len(requests) for load, _ in cells for requests in load.by_seed)
    return [
        Job(name, label, partial(_run, variant, cells), weight)
        for label, variant in variants.items()
    ]
