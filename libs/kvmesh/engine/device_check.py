"""Checks that the engine's kernels run on a device, before anything is loaded.

Tests: tests/unit/engine/test_device_check.py.
"""

from __future__ import annotations

import torch

from kvmesh.core.errors import ConfigError
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.device_names import device_index
from kvmesh.kernels.device_limits import shared_memory_bytes

# Ampere: matrix units with bf16, and asynchronous copies to shared memory.
_LEAST_CAPABILITY = (8, 0)
# Bytes of shared memory of `latent_attention`: per value of an fp32 vector, and constant.
_FP32_LATENT_BYTES, _LATENT_BYTES = 256, 512


def require_device(device: str) -> None:
    """Refuses, in one line, a device that the kernels do not support.

    Args:
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: there is no such device, or it is not an NVIDIA GPU of Ampere or later.
    """
    index = device_index(device)
    if index is None:
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for and there is no CUDA device")
    if torch.version.hip is not None:
        raise ConfigError(f"device {device!r}: AMD GPUs are not supported; use cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device {device!r} was asked for and there are {count} CUDA devices")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        raise ConfigError(
            f"device {device!r}: {name} has compute capability {major}.{minor}; "
            "the kernels need 8.0 (Ampere) or later"
        )


def require_room_for_latents(config: ModelConfig, dtype: str, device: str) -> None:
    """Refuses, in one line, latents in fp32 on a device with too little shared memory.

    Args:
        dtype: dtype that the model computes in.
        device: a device that `require_device` accepted.

    Raises:
        ConfigError: the kernel over latents does not fit the device in this dtype.
    """
    if device == "cpu" or config.latent is None or dtype != "float32":
        return
    latent = config.latent
    width = sum(1 << (size - 1).bit_length() for size in (latent.rank, latent.rope_dim))
    needed, there = width * _FP32_LATENT_BYTES + _LATENT_BYTES, shared_memory_bytes(device)
    if needed > there:
        raise ConfigError(
            f"device {device!r}: latents in float32 need {-(-needed >> 10)} KiB of shared memory "
            f"and {there >> 10} are there; use bfloat16 or float16"
        )
