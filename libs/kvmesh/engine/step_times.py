"""Step durations of a modelled device, from a profile in the simulator's format.

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
    """Seconds of a step as a function of its content.

    Attributes:
        prefill_s: seconds of a whole prompt by its number of tokens; a chunk takes the difference.
        step_s: constant seconds of a step with decoding sequences.
        sequence_s: additional seconds per decoding sequence.
        token_s: additional seconds per token of their contexts.
    """

    prefill_s: Curve
    step_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0

    def of(self, spans: Iterable[Span]) -> float:
        """Returns the seconds of a step with these chunks; chunks of one token decode."""
        total = 0.0
        num_decoding = context = 0
        for start, end in spans:
            if end - start == 1:
                num_decoding += 1
                context += end
            else:
                # The constant cost of a prompt comes with its first chunk.
                total += self.prefill_s(end) - (self.prefill_s(start) if start else 0.0)
        if num_decoding:
            total += self.step_s + self.sequence_s * num_decoding + self.token_s * context
        return total


def load_step_times(path: Path, device: str) -> StepTimes:
    """Reads one device of a profile file.

    Raises:
        ConfigError: the file is not a profile, or lacks the device.
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
