"""Architecture of a checkpoint, read from the files that Hugging Face folders hold.

Accepts the keys of transformers 5 (`rope_parameters`, `dtype`) and the older ones (`rope_theta`,
`rope_scaling`, `torch_dtype`). Torch-free. Tests: tests/unit/engine/test_config.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.core.errors import CheckpointError
from kvmesh.core.types import DTYPE_BYTES

SUPPORTED = (
    "supported are Llama, Qwen2 and Qwen3 dense checkpoints in safetensors, with full attention, "
    "silu, rope types default, linear and llama3, and no quantization"
)
_FAMILIES = ("llama", "qwen2", "qwen3")

NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        kind: "default", "linear" or "llama3".
        factor: how far the context was stretched; 1 for "default".
        low_freq_factor, high_freq_factor, original_max_positions: of "llama3" only.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a dense decoder.

    Attributes:
        qkv_bias, output_bias: of the attention projections.
        qk_norm: queries and keys are normalised per head (Qwen3).
        dtype: of the weights in the files.
        eos_token_ids: of generation_config.json and config.json together.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    dtype: str
    eos_token_ids: frozenset[int]

    @property
    def num_parameters(self) -> int:
        """Weights in the matrices; norms and biases are left out."""
        heads = self.num_heads + self.num_kv_heads
        attention = 2 * heads * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings


def load_model_config(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed, or the architecture is not supported.
    """
    path = folder / "config.json"
    raw = _read_json(path)
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    return parse_model_config(raw, generation, origin=str(path))


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], *, origin: str
) -> ModelConfig:
    """Turns the parsed JSON files into a config.

    Args:
        origin: named in errors.

    Raises:
        CheckpointError: a key is missing, has the wrong type, or asks for what is not supported.
    """
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise CheckpointError(f"{origin}: model_type {family!r} is not supported; {SUPPORTED}")
    _refuse_unsupported(raw, origin)

    hidden_size = _number(raw, "hidden_size", int, origin)
    num_heads = _number(raw, "num_attention_heads", int, origin)
    num_kv_heads = _number(raw, "num_key_value_heads", int, origin, default=num_heads)
    # Qwen3 fixes the head size apart from the hidden size, and its files may leave it out.
    usual_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
    head_dim = _number(raw, "head_dim", int, origin, default=usual_head_dim)
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{origin}: {num_heads} heads, {num_kv_heads} KV heads and head size {head_dim} "
            "do not fit together"
        )
    max_positions = _number(raw, "max_position_embeddings", int, origin)
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=_number(raw, "vocab_size", int, origin),
        hidden_size=hidden_size,
        intermediate_size=_number(raw, "intermediate_size", int, origin),
        num_layers=_number(raw, "num_hidden_layers", int, origin),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", float, origin, default=1e-6),
        rope=_parse_rope(raw, max_positions, origin),
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        qk_norm=family == "qwen3",
        dtype=_parse_dtype(raw, origin),
        eos_token_ids=_eos_ids(raw, origin) | _eos_ids(generation, origin),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return value


def _refuse_unsupported(raw: Mapping[str, Any], origin: str) -> None:
    found = []
    if raw.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act {raw['hidden_act']!r}")
    if raw.get("quantization_config") is not None:
        found.append("quantization_config")
    if raw.get("mlp_bias"):
        found.append("mlp_bias")
    if raw.get("use_sliding_window"):
        found.append("use_sliding_window")
    odd_layers = set(raw.get("layer_types") or ()) - {"full_attention"}
    if odd_layers:
        found.append(f"layer types {', '.join(sorted(odd_layers))}")
    if found:
        raise CheckpointError(f"{origin}: {'; '.join(found)} is not supported; {SUPPORTED}")


def _number(
    raw: Mapping[str, Any],
    key: str,
    kind: type[NumberT],
    origin: str,
    default: NumberT | None = None,
) -> NumberT:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{origin}: {key} must be a number, got {value!r}")
    if value <= 0:
        raise CheckpointError(f"{origin}: {key} must be positive, got {value!r}")
    return kind(value)


def _parse_rope(raw: Mapping[str, Any], max_positions: int, origin: str) -> RopeConfig:
    # Keys of `rope_parameters` win; older files keep theta beside an optional `rope_scaling`.
    table = {"rope_theta": raw.get("rope_theta")}
    table |= raw.get("rope_scaling") or {}
    table |= raw.get("rope_parameters") or {}
    kind = table.get("rope_type", table.get("type", "default"))
    partial = table.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise CheckpointError(f"{origin}: partial rotary embedding is not supported; {SUPPORTED}")
    theta = _number(table, "rope_theta", float, origin, default=10000.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = _number(table, "factor", float, origin)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind != "llama3":
        raise CheckpointError(f"{origin}: rope type {kind!r} is not supported; {SUPPORTED}")
    return RopeConfig(
        theta,
        kind,
        factor,
        _number(table, "low_freq_factor", float, origin),
        _number(table, "high_freq_factor", float, origin),
        _number(table, "original_max_position_embeddings", int, origin, default=max_positions),
    )


def _parse_dtype(raw: Mapping[str, Any], origin: str) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"{origin}: dtype {name!r} is not supported; {SUPPORTED}")
    return str(name)


def _eos_ids(raw: Mapping[str, Any], origin: str) -> frozenset[int]:
    value = raw.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(f"{origin}: eos_token_id must be token ids, got {value!r}")
    return frozenset(ids)
