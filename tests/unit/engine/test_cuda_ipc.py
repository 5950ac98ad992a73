"""What the CUDA driver is called with, by a stand-in that is strict about it; no device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from kvmesh.core.errors import LostError
from kvmesh.engine.cuda_ipc import CudaIpc

BASE, SIZE, THERE = 0x7F00DEADBEEF0000, 1 << 20, 0x7E00CAFE00000000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C compiler")
    built = tmp_path_factory.mktemp("driver") / "fake.so"
    source = Path(__file__).with_name("fake_driver.c")
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-o", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return str(built)


def num_held(library: str) -> int:
    """Contexts and mappings that were not given back."""
    held: int = ctypes.CDLL(library).fake_held()
    return held


def test_an_allocation_is_exported_with_the_offset_of_what_lies_in_it(library: str) -> None:
    handle, offset = CudaIpc(1, library).export(BASE + 4096, SIZE - 4096)
    assert offset == 4096
    assert len(handle) == 64
    assert handle[:6] == bytes([0, 199, 198, 197, 196, 0])
    assert num_held(library) == 0


def test_memory_beyond_its_allocation_is_not_exported(library: str) -> None:
    with pytest.raises(LostError, match="not one allocation"):
        CudaIpc(1, library).export(BASE + 4096, SIZE)
    assert num_held(library) == 0


def test_an_allocation_is_opened_once_for_all_its_users_in_any_thread(library: str) -> None:
    driver = ctypes.CDLL(library)
    calls = CudaIpc(1, library)
    handle, _ = calls.export(BASE, SIZE)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(calls.open(handle, SIZE)))
    thread.start()
    thread.join()
    assert [*found, calls.open(handle, 1)] == [THERE, THERE]
    assert calls.ordinal_of(THERE) == 3
    calls.close(handle)
    assert driver.fake_mapped() == 1
    calls.close(handle)
    assert num_held(library) == 0


def test_what_the_driver_refuses_is_named_and_leaves_nothing(library: str) -> None:
    calls = CudaIpc(1, library)
    handle, _ = calls.export(BASE, SIZE)
    with pytest.raises(LostError, match=r"cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE \(1\)"):
        calls.open(bytes(64), SIZE)
    with pytest.raises(LostError, match="were announced"):
        calls.open(handle, SIZE + 1)
    with pytest.raises(LostError, match="cuPointerGetAttribute"):
        calls.ordinal_of(BASE)
    with pytest.raises(LostError, match="cuDeviceGet"):
        CudaIpc(2, library)
    assert num_held(library) == 0


def test_without_a_driver_nothing_is_shared() -> None:
    with pytest.raises(LostError, match="libnowhere"):
        CudaIpc(0, "libnowhere.so.1")
