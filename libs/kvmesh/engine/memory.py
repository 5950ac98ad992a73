"""Memory that a model needs and that the host has, known before loading. Torch-free.

Tests: tests/unit/engine/test_memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvmesh.core.control_groups import memory_left
from kvmesh.core.errors import ConfigError
from kvmesh.core.kv_formats import DTYPE_BYTES
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.kv_plan import kv_layout, plan_kv

_GIB = 1 << 30
# Activations of the largest usual step, the libraries' work space, and a margin.
_WORK_BYTES = 256 << 20
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that serving a model takes."""

    weights_bytes: int
    kv_bytes: int
    work_bytes: int

    @property
    def total_bytes(self) -> int:
        """Total number of bytes."""
        return self.weights_bytes + self.kv_bytes + self.work_bytes


def resolve_dtype(config: ModelConfig, dtype: str) -> str:
    """Returns the computation dtype: the checkpoint's own for "auto".

    Raises:
        ConfigError: the name is unknown.
    """
    if dtype == "auto":
        return config.dtype
    if dtype not in DTYPE_BYTES:
        known = ", ".join(["auto", *DTYPE_BYTES])
        raise ConfigError(f"dtype {dtype!r} is unknown; known: {known}")
    return dtype


def available_bytes() -> int:
    """Returns the memory in bytes that this process may still take: of host and container."""
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(min(int(value.split()[0]) << 10, memory_left()))
    raise ConfigError(f"{_MEMINFO} does not say how much memory is available")


def require_memory(need: MemoryNeed, available: int) -> None:
    """Checks that the need is within the available bytes.

    Raises:
        ConfigError: it is not; the message has the numbers and what to change.
    """
    if need.total_bytes <= available:
        return
    raise ConfigError(
        f"the model needs {need.total_bytes / _GIB:.2f} GiB "
        f"({need.weights_bytes / _GIB:.2f} weights, {need.kv_bytes / _GIB:.2f} KV blocks, "
        f"{need.work_bytes / _GIB:.2f} work space) and {available / _GIB:.2f} GiB are free: "
        "use fewer blocks, a smaller dtype or a smaller model"
    )


def memory_needed(
    config: ModelConfig, *, dtype: str, num_blocks: int, block_size: int
) -> MemoryNeed:
    """Returns the memory that `TorchRunner.load` with these arguments will take.

    Raises:
        ConfigError: the dtype is unknown.
    """
    resolved = resolve_dtype(config, dtype)
    plan = plan_kv(config, resolved, block_size)
    layout = kv_layout(config, plan, dtype=resolved, fingerprint="")
    # A head tied to the embedding is a copy of it, in the layout of matrix products.
    head = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return MemoryNeed(
        weights_bytes=(config.num_parameters + head) * DTYPE_BYTES[resolved],
        kv_bytes=num_blocks * layout.block_bytes,
        work_bytes=_WORK_BYTES,
    )
