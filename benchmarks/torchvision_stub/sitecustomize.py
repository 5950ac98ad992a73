"""Lets torchvision be imported beside a torch that its compiled operators were not built for.

Dynamo's worker imports it, and PyPI has it for CUDA alone. Nothing here calls its operators; they
have to be known when its Python code is loaded.
"""

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
