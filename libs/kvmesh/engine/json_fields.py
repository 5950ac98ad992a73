"""Typed reading of a checkpoint's JSON files; whatever is wrong names the file and the key.

Accepts the keys of transformers 5 (`rope_parameters`, `dtype`) and the older ones (`rope_theta`,
`rope_scaling`, `torch_dtype`). Torch-free. Tests: tests/unit/engine/test_config.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.core.errors import CheckpointError
from kvmesh.core.types import DTYPE_BYTES
from kvmesh.engine.config import RopeConfig

NumberT = TypeVar("NumberT", int, float)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: it cannot be read or is no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and where it comes from.

    Attributes:
        origin: named in errors.
    """

    raw: Mapping[str, Any]
    origin: str

    def number(self, key: str, kind: type[NumberT], default: NumberT | None = None) -> NumberT:
        """A positive number.

        Raises:
            CheckpointError: it is missing without a default, no number, or not positive.
        """
        value = self.raw.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.origin}: {key} must be a number, got {value!r}")
        if value <= 0:
            raise CheckpointError(f"{self.origin}: {key} must be positive, got {value!r}")
        return kind(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value."""
        value = self.raw.get(key)
        return default if value is None else bool(value)

    def dtype(self) -> str:
        """Dtype of the weights.

        Raises:
            CheckpointError: it is not one that can be computed in.
        """
        name = self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"
        if name not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise CheckpointError(
                f"{self.origin}: dtype {name!r} is not supported; supported are {known}"
            )
        return str(name)

    def eos_ids(self) -> frozenset[int]:
        """Tokens that end generation.

        Raises:
            CheckpointError: they are not token ids.
        """
        value = self.raw.get("eos_token_id")
        if value is None:
            return frozenset()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) for token in ids):
            raise CheckpointError(f"{self.origin}: eos_token_id must be token ids, got {value!r}")
        return frozenset(ids)

    def layer_types(self, num_layers: int) -> tuple[str, ...] | None:
        """Kind of attention of each layer, where the file says.

        Raises:
            CheckpointError: their number is not that of the layers.
        """
        types = self.raw.get("layer_types")
        if types is None:
            return None
        if len(types) != num_layers:
            raise CheckpointError(
                f"{self.origin}: {len(types)} layer_types for {num_layers} layers"
            )
        return tuple(types)

    def rope(self, default_theta: float = 10000.0, layer_type: str | None = None) -> RopeConfig:
        """The rotary embedding, of one layer type where the file has several.

        Raises:
            CheckpointError: a value is malformed or the kind is not supported.
        """
        # Keys of `rope_parameters` win; older files keep theta beside an optional `rope_scaling`.
        table: dict[str, Any] = {"rope_theta": self.raw.get("rope_theta")}
        table |= self.raw.get("rope_scaling") or {}
        parameters = self.raw.get("rope_parameters") or {}
        table |= parameters.get(layer_type, parameters) if layer_type else parameters
        max_positions = self.number("max_position_embeddings", int)
        return Fields(table, self.origin)._rope_of_kind(default_theta, max_positions)

    def rotary_dim(self, head_dim: int, default: float = 1.0) -> int:
        """Elements of a head that are rotated.

        Raises:
            CheckpointError: the share is no number, or leaves half a pair.
        """
        parameters = self.raw.get("rope_parameters") or {}
        key = "partial_rotary_factor"
        value = parameters.get(key, self.raw.get(key))
        share = Fields({key: value}, self.origin).number(key, float, default=default)
        rotated = int(head_dim * share)
        if rotated % 2 or (head_dim - rotated) % 2 or rotated > head_dim:
            raise CheckpointError(f"{self.origin}: {key} {share} of {head_dim} is not supported")
        return rotated

    def yarn_scale(self) -> float:
        """Factor by which yarn sharpens queries and keys of DeepSeek; 1 without `mscale_all_dim`.

        Raises:
            CheckpointError: a value is no number.
        """
        table: dict[str, Any] = dict(self.raw.get("rope_scaling") or {})
        table |= self.raw.get("rope_parameters") or {}
        if table.get("rope_type", table.get("type", "default")) == "default":
            return 1.0
        scaling = Fields(table, self.origin)
        return _yarn_mscale(scaling.number("factor", float), table.get("mscale_all_dim") or 0.0)

    def _rope_of_kind(self, default_theta: float, max_positions: int) -> RopeConfig:
        kind = self.raw.get("rope_type", self.raw.get("type", "default"))
        theta = self.number("rope_theta", float, default=default_theta)
        if kind == "default":
            return RopeConfig(theta)
        factor = self.number("factor", float)
        if kind == "linear":
            return RopeConfig(theta, kind, factor)
        original = self.number("original_max_position_embeddings", int, default=max_positions)
        if kind == "llama3":
            return RopeConfig(
                theta,
                kind,
                factor,
                self.number("low_freq_factor", float),
                self.number("high_freq_factor", float),
                original,
            )
        if kind == "yarn":
            mscale, mscale_all = self.raw.get("mscale"), self.raw.get("mscale_all_dim")
            usual = _yarn_mscale(factor, 1.0)
            if mscale and mscale_all:
                usual = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
            return RopeConfig(
                theta,
                kind,
                factor,
                original_max_positions=original,
                beta_fast=self.number("beta_fast", float, default=32.0),
                beta_slow=self.number("beta_slow", float, default=1.0),
                truncate=self.flag("truncate", default=True),
                scale=self.number("attention_factor", float, default=usual),
            )
        raise CheckpointError(
            f"{self.origin}: rope type {kind!r} is not supported; supported are default, linear, "
            "llama3 and yarn"
        )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
