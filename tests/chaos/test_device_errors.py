"""A worker whose device fails and whose engine still computes: NVML tells, and it is ejected.

The engine is the fake. Its process reads errors as one on a GPU does, through `pynvml`, from a
stand-in for the driver.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.chaos.load import under_load
from tests.chaos.test_engine_faults import EJECTED_WITHIN_S, STEP, ejections
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import Flags, running_mesh
from tests.unit.runtime.test_device_watch import DOUBLE_BIT, GPU_IS_LOST, build_driver
from tests.waiting import until

ILL = "decode-0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "fault"),
    [
        (f"0 0 0 1 {DOUBLE_BIT}", "its device reports errors that it cannot correct"),
        # How each is read is in test_device_watch.py.
        pytest.param(
            "1 0 0 0 0", "its device reports errors that it cannot correct", marks=pytest.mark.long
        ),
        pytest.param(
            f"0 0 {GPU_IS_LOST} 0 0",
            "its device does not answer, or must be reset",
            marks=pytest.mark.long,
        ),
    ],
    ids=["xid", "memory", "lost"],
)
async def test_a_worker_with_a_faulty_device_is_ejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, fault: str
) -> None:
    drivers, state = tmp_path / "drivers", tmp_path / "device"
    drivers.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        build_driver(drivers, name)
    paths = [str(drivers), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(paths))
    monkeypatch.setenv("FAKE_NVML", str(state))
    of_device = {"engine.device": "cuda"}
    flags: dict[str, Flags] = {"prefill": STEP, "decode": STEP, ILL: of_device}
    async with (
        running_mesh(tmp_path, 2, 2, flags=flags, is_forked=False) as mesh,
        ApiClient(mesh.url) as client,
    ):
        async with under_load(client) as load:
            await load.more(20)
            assert not ejections(mesh)
            began = time.time()
            state.write_text(device)
            await until(lambda: ejections(mesh), f"{ILL} is ejected")
            await load.more(20)
        (name, at), *others = ejections(mesh)
        assert (name, others) == (ILL, [])
        assert at - began <= EJECTED_WITHIN_S
        load.check_all_ok()
        told = [each["fault"] for each in mesh["scheduler"].events() if "fault" in each]
        assert told[0] == fault
