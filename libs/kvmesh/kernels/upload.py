"""Small tensors of host numbers, sent to a device without waiting for it.

A copy from ordinary memory waits until the device has finished all earlier launches; one from
pinned memory does not. Tests: tests/unit/kernels/test_upload.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of these numbers on the device.

    Args:
        values: a list, possibly nested, or a NumPy array.
    """
    made = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)
