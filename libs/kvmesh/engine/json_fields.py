"""Typed reading of a checkpoint's JSON files; whatever is wrong names the file and the key.

Accepts the key of transformers 5 (`dtype`) and the older one (`torch_dtype`); rope_fields.py reads
those of rotations. Torch-free. Tests: tests/unit/engine/test_config.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.core.errors import CheckpointError
from kvmesh.core.kv_formats import DTYPE_BYTES

NumberT = TypeVar("NumberT", int, float)
_NUMBERS_END = 1 << 63
_OLDER_TYPES = {"attention": "full_attention", "mamba": "linear_attention"}
"""Of layers, as older files call them."""


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


def read_json_if_any(path: Path) -> dict[str, Any]:
    """As `read_json`; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


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
        if not 0 < value < _NUMBERS_END:
            text = f"{self.origin}: {key} must be positive and below 2^63, got {str(value)[:30]}"
            raise CheckpointError(text)
        if kind is int and value != int(value):
            raise CheckpointError(f"{self.origin}: {key} must be a whole number, got {value!r}")
        return kind(value)

    def count(self, key: str, default: int) -> int:
        """A whole number that may be zero.

        Raises:
            CheckpointError: it is none.
        """
        value = self.raw.get(key)
        if value is None:
            return default
        return 0 if value == 0 else self.number(key, int)

    def real(self, key: str, default: float) -> float:
        """A number of any sign.

        Raises:
            CheckpointError: it is none.
        """
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, int | float) and value < 0:
            return -Fields({key: -value}, self.origin).number(key, float)
        return 0.0 if value == 0 else self.number(key, float)

    def only(self, key: str, *computed: object) -> None:
        """Refuses what a key asks for, unless it is one of those that are computed.

        Raises:
            CheckpointError: it is none of them.
        """
        value = self.raw.get(key)
        if value is not None and value not in computed:
            names = " and ".join(repr(each) for each in computed)
            raise CheckpointError(
                f"{self.origin}: {key} {value!r} is not supported; supported is {names}"
            )

    def numbers(self, key: str) -> tuple[int, ...]:
        """Whole numbers, none where the key is missing.

        Raises:
            CheckpointError: it is no list of them.
        """
        values = self.raw.get(key) or []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise CheckpointError(f"{self.origin}: {key} must be whole numbers, got {values!r}")
        return tuple(values)

    def reals(self, key: str) -> tuple[float, ...]:
        """Positive numbers.

        Raises:
            CheckpointError: the key is missing, no list, or holds something else.
        """
        values = self.raw.get(key)
        if not isinstance(values, list):
            raise CheckpointError(f"{self.origin}: {key} must be numbers, got {values!r}")
        return tuple(Fields({key: value}, self.origin).number(key, float) for value in values)

    def names(self, key: str, count: int) -> tuple[str, ...] | None:
        """One name for each layer, where the file says.

        Raises:
            CheckpointError: it is no list of names, or their number is not that of the layers.
        """
        names = self.raw.get(key)
        if names is None:
            return None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{self.origin}: {key} must be names, got {names!r}")
        if len(names) != count:
            raise CheckpointError(f"{self.origin}: {len(names)} {key} for {count} layers")
        return tuple(names)

    def table(self, key: str) -> Mapping[str, Any]:
        """A JSON object, empty where the key is missing.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.origin}: {key} must be an object, got {value!r}")
        return value

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
        if not isinstance(name, str) or name not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise CheckpointError(
                f"{self.origin}: dtype {name!r} is not supported; supported are {known}"
            )
        return name

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
            CheckpointError: they are malformed, or their number is not that of the layers.
        """
        types = self.names("layer_types", num_layers)
        return types and tuple(_OLDER_TYPES.get(kind, kind) for kind in types)
