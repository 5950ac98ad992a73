"""How long steps of a modelled device take, from a profile as the simulator reads it.

Tests: tests/unit/engine/test_step_times.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.engine.json_fields import read_json
from kvmesh.policy.curves import Curve, Interpolated, Quadratic

Span = tuple[int, int]
"""First position of a chunk, and one past its last."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step by what it computes.

    Attributes:
        prefill_s: of a whole prompt of so many tokens; a part of it takes the difference.
        step_s: of a decode step, whatever is in it.
        sequence_s: more for each sequence that decodes.
        token_s: more for each token of their contexts.
    """

    prefill_s: Curve
    step_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0

    def of(self, spans: Iterable[Span]) -> float:
        """Seconds of a step with these chunks; those of one token decode."""
        total = 0.0
        num_decoding = context = 0
        for start, end in spans:
            if end - start == 1:
                num_decoding += 1
                context += end
            else:
                # What every prompt costs at least comes with its first part.
                total += self.prefill_s(end) - (self.prefill_s(start) if start else 0.0)
        if num_decoding:
            total += self.step_s + self.sequence_s * num_decoding + self.token_s * context
        return total


def load_step_times(path: Path, device: str) -> StepTimes:
    """Reads one device of a profile file.

    Raises:
        ConfigError: the file is no profile, or has no such device.
    """
    try:
        devices = read_json(path).get("devices")
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(devices, dict) or device not in devices:
        known = ", ".join(devices) if isinstance(devices, dict) else "none"
        raise ConfigError(f"{path}: there is no device {device!r}; it has {known}")
    try:
        entry = devices[device]
        decode = entry["decode_s"]
        return StepTimes(
            _curve(entry["prefill_s"]),
            float(decode["constant"]),
            float(decode["per_sequence"]),
            float(decode["per_token"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: device {device!r}: {error!r}") from error


def _curve(entry: dict[str, Any]) -> Curve:
    if "points" in entry:
        pairs = entry["points"]
        return Interpolated(tuple((float(length), float(value)) for length, value in pairs))
    return Quadratic(*(float(each) for each in entry["quadratic"]))
