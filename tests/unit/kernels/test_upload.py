from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmesh.kernels.upload import sent


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([3, -1], torch.int64),
        ([], torch.int64),
        ([[1, 2], [3, 4]], torch.int32),
        (np.array([1, 2**40]), torch.int64),
        (np.array([True, False]), torch.bool),
        ([0.5, float("inf")], torch.float32),
    ],
    ids=str,
)
def test_numbers_arrive_as_they_were(values: list[object], dtype: torch.dtype) -> None:
    tensor = sent(values, dtype, torch.device("cpu"))
    assert tensor.dtype == dtype
    assert tensor.tolist() == np.asarray(values).tolist()
