"""Finds the CUDA devices by the driver alone. Torch-free.

Tests: tests/unit/engine/test_device_names.py.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Callable

from kvmesh.core.errors import ConfigError

_BUS_ID_BYTES = 32
_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]*))?")


def device_index(device: str) -> int | None:
    """Returns the number of a CUDA device; None for "cpu".

    Args:
        device: "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: it is none of these.
    """
    if device == "cpu":
        return None
    named = _CUDA.fullmatch(device)
    if named is None:
        raise ConfigError(f"{device!r} is no device that the engine runs on: cpu, cuda or cuda:N")
    return int(named[1] or 0)


def num_devices(driver: str = "libcuda.so.1") -> int:
    """Returns the number of CUDA devices that this process may use; 0 without a driver.

    Args:
        driver: file name of the driver library.
    """
    try:
        cuda = ctypes.CDLL(driver)
        count = ctypes.c_int(0)
        failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


class DeviceTurns:
    """Gives the engines of one host devices in turn."""

    def __init__(self, device: str, count_devices: Callable[[], int] = num_devices) -> None:
        """Counts devices at the first turn.

        Args:
            device: "cuda": any of them; another name is given to all engines.
            count_devices: returns the number of devices.
        """
        self._device = device
        self._count_devices = count_devices
        self._next = 0

    def take(self, num_ranks: int) -> str:
        """Returns the device of an engine's first rank; those of the others follow it."""
        if self._device != "cuda":
            return self._device
        count = self._count_devices()
        if self._next + num_ranks > count:
            self._next = 0
        first = self._next
        self._next += num_ranks
        return f"cuda:{first}"


def pci_bus_id(index: int, driver: str = "libcuda.so.1") -> str:
    """Returns the address on the PCI bus of a CUDA device that this process may use.

    Args:
        driver: file name of the driver library.

    Raises:
        OSError: there is no driver, or it does not know the device.
    """
    cuda = ctypes.CDLL(driver)
    device, text = ctypes.c_int(), ctypes.create_string_buffer(_BUS_ID_BYTES)
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), index)
        or cuda.cuDeviceGetPCIBusId(text, _BUS_ID_BYTES, device)
    )
    if failed:
        raise OSError(f"cuda:{index} has no PCI address, CUDA error {failed}")
    return text.value.decode()


def require_named_device(device: str, *, count_devices: Callable[[], int] = num_devices) -> None:
    """Refuses a missing device with one line, before anything of torch is loaded.

    `require_device` checks the kind of device later, once torch is loaded.

    Args:
        count_devices: returns the number of devices.

    Raises:
        ConfigError: the device does not exist, or the installed torch is a build for CPUs.
    """
    index = device_index(device)
    if index is None:
        return
    count = count_devices()
    if index >= count:
        raise ConfigError(
            f"device {device!r} was asked for and there {_counted(count)}; use cpu, or see what "
            "`nvidia-smi` lists"
        )
    if _torch_version().endswith("+cpu"):
        raise ConfigError(
            f"device {device!r} was asked for and the installed torch, {_torch_version()}, is the "
            "build for CPUs alone; install torch from the default index of PyPI"
        )


def _counted(count: int) -> str:
    if count == 1:
        return "is 1 CUDA device, cuda:0"
    return f"are {count} CUDA devices" if count else "is no CUDA device"


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
