"""Tiny models of transformers, one of each `model_type` that is supported."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

from tests.integration.families import random_model
from tests.integration.family_configs import CONFIGS
from tests.integration.test_seeing_checkpoints import CASES

_SEEING = {case.config_class.model_type: case.model_class for case in CASES.values()} | {
    "gemma4_unified": Gemma4UnifiedForConditionalGeneration
}


def config_of(kind: str) -> Any:
    """A config of transformers."""
    for config in CONFIGS.values():
        if config.model_type == kind:
            return config
    if kind == "gemma4_unified":
        return Gemma4UnifiedConfig(text_config=CONFIGS["gemma4-unified"].to_dict())
    for case in CASES.values():
        if case.config_class.model_type == kind:
            label, changes = case.decoder
            return case.config_class(text_config=CONFIGS[label].to_dict() | changes, **case.whole)
    raise AssertionError(f"there is no config of {kind}")


def model_of(kind: str) -> Any:
    """A model with seeded weights."""
    config = config_of(kind)
    if kind not in _SEEING:
        return random_model(config)
    torch.manual_seed(3)
    return _SEEING[kind](config).eval()
