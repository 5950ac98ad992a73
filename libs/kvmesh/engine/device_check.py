"""Whether the engine's kernels run on a device, known before anything is loaded.

Tests: tests/unit/engine/test_device_check.py.
"""

from __future__ import annotations

import re

import torch

from kvmesh.core.errors import ConfigError

# Ampere: matrix units with bf16, and asynchronous copies to shared memory.
_LEAST_CAPABILITY = (8, 0)
_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]*))?")


def require_device(device: str) -> None:
    """Refuses in one line a device that the kernels were not made for.

    Args:
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: there is no such device, or it is not an NVIDIA GPU of Ampere or later.
    """
    if device == "cpu":
        return
    named = _CUDA.fullmatch(device)
    if named is None:
        raise ConfigError(f"{device!r} is no device that the engine runs on: cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for and there is no CUDA device")
    if torch.version.hip is not None:
        raise ConfigError(f"device {device!r}: AMD GPUs are not supported; use cpu")
    index, count = int(named[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device {device!r} was asked for and there are {count} CUDA devices")
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        raise ConfigError(
            f"device {device!r}: {name} has compute capability {major}.{minor}; "
            "the kernels need 8.0 (Ampere) or later"
        )
