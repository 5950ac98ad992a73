"""Bodies of vLLM's routes that load and remove LoRA adapters."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LoadBody(BaseModel):
    """POST /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class UnloadBody(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    lora_name: str = Field(min_length=1)
