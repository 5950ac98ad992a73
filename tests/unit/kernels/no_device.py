"""A CUDA device that is not there: launches compile their kernel for it and compute nothing.

Within `device` tensors on torch's meta device count as CUDA tensors, so that the engine takes its
device's way; whoever looks at what a tensor holds fails, as there is nothing in it. Kernels are
compiled with the constants, types and alignments of the launch, which decide what they take.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from kvmesh.kernels.device_limits import shared_memory_bytes

# Most that one program may have, by architecture.
SHARED_MEMORY_BYTES = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
# Of CUDA, programs along each axis.
_LARGEST_GRID = ((1 << 31) - 1, 65_535, 65_535)

_IS_CUDA: Any = Tensor.is_cuda


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        kernel: its name.
        variant: what was compiled for it; launches of one share it.
        registers: of a thread.
        stack_bytes: of a thread; what did not fit in its registers.
        shared_bytes: of a program.
    """

    kernel: str
    variant: str
    grid: tuple[int, int, int]
    registers: int
    stack_bytes: int
    shared_bytes: int


class _Pointer:
    """What the compiler sees of a tensor, whose memory would begin at a multiple of 256."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._offset = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


class _Driver:
    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # what is compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return device


class _MetaIsCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _IS_CUDA.__get__:
            return args[0].device.type == "meta"
        return func(*args, **(kwargs or {}))


@cache
def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of each thread of a kernel."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


@contextmanager
def device(arch: int) -> Iterator[list[Launch]]:
    """Within it there is a device of the architecture; yields its launches."""
    launches: list[Launch] = []
    compile_only = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del warmup
        seen = [_Pointer(each) if isinstance(each, Tensor) else each for each in args]
        compiled = compile_only(self, *seen, grid=grid, warmup=True, **kwargs)
        whole = (*grid, 1, 1)[:3]
        # Of no programs nothing is launched.
        assert all(0 <= n <= most for n, most in zip(whole, _LARGEST_GRID, strict=True)), whole
        shared = compiled.metadata.shared
        assert shared <= SHARED_MEMORY_BYTES[arch], f"{self.__name__} wants {shared} bytes"
        usage = _usage(compiled.asm["cubin"])
        launches.append(Launch(self.__name__, compiled.hash, whole, *usage, shared))

    shared_memory_bytes.cache_clear()
    with (
        patch.object(driver, "_active", _Driver(arch)),
        patch.object(jit.JITFunction, "run", run),
        patch.object(torch.cuda, "get_device_capability", lambda _: divmod(arch, 10)),
        _MetaIsCuda(),
        torch.inference_mode(),
    ):
        yield launches
    shared_memory_bytes.cache_clear()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor on the device."""
    return torch.empty(shape, dtype=dtype, device="meta")
