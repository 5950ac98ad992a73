from __future__ import annotations

import pytest
import torch

from kvmesh.core.errors import LostError
from kvmesh.engine.device_driver import CudaDriver


class FailedEvent:
    """One of a device that fell off its bus."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_asking_a_device_that_failed_is_a_loss_as_copying_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FailedEvent)
    driver = CudaDriver.__new__(CudaDriver)
    driver.device = torch.device("cuda", 0)
    assert driver.is_past(None)
    with pytest.raises(LostError, match="cuda:0: CUDA error"):
        driver.is_past(FailedEvent())
