"""Tiny random checkpoints of all families, and what transformers makes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvmesh.core.types import SamplingParams
from kvmesh.engine.runner import TorchRunner
from tests.integration.family_configs import CONFIGS
from tests.integration.family_shapes import VOCAB_SIZE

BLOCK_SIZE = 16
NUM_BLOCKS = 1024
NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 7, 16, 33, 250)
WITH_A_LONG_ONE = (*PROMPT_LENGTHS, 2500)
OF_EACH_KIND = (
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "gpt-oss",
    "mistral-window",
    "deepseek-v3",
    "qwen3-next",
    "qwen3.5",
    "kimi-linear",
    "bailing-hybrid",
    "minimax",
    "lfm2",
    "lfm3",
    "granite4-hybrid",
    "falcon-h1",
    "nemotron-h",
    "olmo3",
    "olmo-hybrid",
    "exaone4",
)
"""Families whose layers keep different things, or in another order than others'."""

FOR_ALL = frozenset((*OF_EACH_KIND, "llama-untied-sharded", "gpt2", "mixtral", "phi3-longrope"))
"""These, and some with full attention alone: they stand for all families in tests of what does not
depend on the inside of a layer. The others run under the marker `long`."""

GREEDY = SamplingParams(temperature=0.0)


def random_model(config: Any) -> Any:
    """A model of transformers in fp32 with seeded weights."""
    torch.set_num_threads(1)
    torch.manual_seed(17)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config).eval()
    for name, parameter in model.named_parameters():
        # Norm weights of one and biases of zero would hide a missing product or sum.
        if parameter.dim() == 1:
            offset = 0.0 if name.endswith("bias") else 1.0
            torch.nn.init.normal_(parameter, offset, 0.2)
        elif "experts" in name:
            # These are not filled by every class of models, and then hold what memory held.
            torch.nn.init.normal_(parameter, 0.0, 0.25)
    for name, bias in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("correction_bias", "expert_bias")):
            torch.nn.init.normal_(bias, 0.0, 0.2)
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(bias, 0.5, 1.5)
    return model


def prompt_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    """What a model of transformers gives every token but the first."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0]


class Checkpoint:
    """A random model on disk, and what transformers makes of it.

    Args:
        config: in place of the family's tiny one.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        lengths: Sequence[int] = PROMPT_LENGTHS,
        config: Any = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self._model = random_model(CONFIGS[name] if config is None else config)
        self._model.save_pretrained(folder, max_shard_size="100KB" if "sharded" in name else "1GB")
        draw = random.Random(5)
        self.prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]
        self.expected = [self.continue_greedily(prompt) for prompt in self.prompts]

    def continue_greedily(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return [int(token) for token in out[0, len(prompt) :]]

    def prompt_logprobs(self, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Of every token but the first, computed in a dtype."""
        factory: Any = AutoModelForCausalLM
        # The fused products of experts want sizes that tiny models do not have.
        model = factory.from_pretrained(
            self.folder, dtype=dtype, experts_implementation="eager"
        ).eval()
        return prompt_logprobs(model, prompt)

    def runner(self, dtype: str = "auto", max_model_len: int | None = None) -> TorchRunner:
        return TorchRunner.load(
            self.folder,
            served_name="tiny",
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            max_model_len=max_model_len,
        )
