"""vLLM's steps over a pool that only its device reaches, which is imitated in host memory."""

from __future__ import annotations

from benchmarks.gpu_vllm import CHECKS, MODEL, greedy, request_of, run
from kvmesh.core.config import default_environment
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.vllm_check import engine_environment
from tests.device_twin import TwinDriver


def test_every_check_for_a_device_passes_on_the_twin() -> None:
    default_environment(engine_environment(1))
    expected = greedy(MODEL, "float32")
    from kvmesh.engine.vllm_runner import VllmRunner

    driver = TwinDriver()
    request = request_of(MODEL, "float32", graphs=False)
    runner = VllmRunner.load(request, "twin", make_driver=lambda _: driver)
    assert isinstance(runner.kv, DeviceKvPool)
    marks = driver.num_marks
    rows = run(runner, expected)
    assert [row["check"] for row in rows] == list(CHECKS)
    assert not [row for row in rows if row["result"].startswith("FAILED")]
    # Copies wait for the step that was launched before them.
    assert driver.num_marks > marks
    wrong = run(runner, [token + 1 for token in expected])
    assert wrong[1]["result"].startswith("FAILED: ValueError: token 0 of ")
    assert all(not row["result"].startswith("FAILED") for row in wrong[2:])
    runner.close()
