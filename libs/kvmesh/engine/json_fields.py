"""Typed access to a checkpoint's JSON files; errors name the file and the key.

Accepts the key of transformers 5 (`dtype`) and the older one (`torch_dtype`); rope_fields.py reads
the keys of rotary embeddings. Torch-free. Tests: tests/unit/engine/test_config.py.
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
"""Layer types by their names in older files."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Raises:
        CheckpointError: it cannot be read or is not an object.
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
    """Variant of `read_json` that returns an empty object if there is no such file."""
    return read_json(path) if path.is_file() else {}


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and its origin.

    Attributes:
        origin: file name for error messages.
    """

    raw: Mapping[str, Any]
    origin: str

    def number(self, key: str, kind: type[NumberT], default: NumberT | None = None) -> NumberT:
        """Returns a positive number.

        Raises:
            CheckpointError: it is missing without a default, not a number, or not positive.
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
        """Returns a whole number, which may be zero.

        Raises:
            CheckpointError: it is neither.
        """
        value = self.raw.get(key)
        if value is None:
            return default
        return 0 if value == 0 else self.number(key, int)

    def real(self, key: str, default: float) -> float:
        """Returns a number of any sign.

        Raises:
            CheckpointError: it is not a number.
        """
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, int | float) and value < 0:
            return -Fields({key: -value}, self.origin).number(key, float)
        return 0.0 if value == 0 else self.number(key, float)

    def only(self, key: str, *computed: object) -> None:
        """Refuses a key's value unless it is missing or one of the computed values.

        Raises:
            CheckpointError: the value is not computed.
        """
        value = self.raw.get(key)
        if value is not None and value not in computed:
            names = " and ".join(repr(each) for each in computed)
            raise CheckpointError(
                f"{self.origin}: {key} {value!r} is not supported; supported is {names}"
            )

    def numbers(self, key: str) -> tuple[int, ...]:
        """Returns a list of whole numbers, empty if the key is missing.

        Raises:
            CheckpointError: it is not a list of whole numbers.
        """
        values = self.raw.get(key) or []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise CheckpointError(f"{self.origin}: {key} must be whole numbers, got {values!r}")
        return tuple(values)

    def reals(self, key: str) -> tuple[float, ...]:
        """Returns a list of positive numbers.

        Raises:
            CheckpointError: the key is missing, not a list, or contains anything else.
        """
        values = self.raw.get(key)
        if not isinstance(values, list):
            raise CheckpointError(f"{self.origin}: {key} must be numbers, got {values!r}")
        return tuple(Fields({key: value}, self.origin).number(key, float) for value in values)

    def names(self, key: str, count: int) -> tuple[str, ...] | None:
        """Returns one name per layer; None if the key is missing.

        Raises:
            CheckpointError: it is not a list of names, or their number is not that of the layers.
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
        """Returns a JSON object, empty if the key is missing.

        Raises:
            CheckpointError: it is not an object.
        """
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.origin}: {key} must be an object, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns a truth value."""
        value = self.raw.get(key)
        return default if value is None else bool(value)

    def dtype(self) -> str:
        """Returns the dtype of the weights.

        Raises:
            CheckpointError: the dtype is not supported.
        """
        name = self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise CheckpointError(
                f"{self.origin}: dtype {name!r} is not supported; supported are {known}"
            )
        return name

    def eos_ids(self) -> frozenset[int]:
        """Returns the tokens that end generation.

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
        """Returns the type of each layer; None if the file does not specify them.

        Raises:
            CheckpointError: they are malformed, or their number is not that of the layers.
        """
        types = self.names("layer_types", num_layers)
        return types and tuple(_OLDER_TYPES.get(kind, kind) for kind in types)
