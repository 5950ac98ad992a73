"""Random checkpoints of the configs in random_families.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.random_families import FAMILIES


def random_model(label: str, seed: int, **changes: Any) -> Any:
    """A model of transformers with random weights, in fp32.

    Args:
        changes: of its configuration.
    """
    import transformers  # noqa: PLC0415 - slow, and only a peer

    kind, values = FAMILIES[label]
    factory: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    model = factory.from_config(getattr(transformers, kind)(**values | changes)).eval()
    for name, parameter in model.named_parameters():
        # Not every class fills its experts, which then hold what memory held.
        if parameter.dim() > 1 and "experts" in name:
            nn.init.normal_(parameter, 0.0, 0.02)
    return model


def write_checkpoint(model: Any, folder: Path) -> Path:
    """Writes config and bf16 weights; returns the folder."""
    from transformers.utils import logging  # noqa: PLC0415 - slow, and only a peer

    bars: Any = logging
    bars.disable_progress_bar()
    convert(model, torch.bfloat16).save_pretrained(folder)
    return folder


def convert(model: Any, dtype: torch.dtype) -> Any:
    """Changes the dtype of all but the angles of rotation, as transformers does on loading."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if "inv_freq" not in name and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return model
