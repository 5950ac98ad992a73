"""A dense decoder of the Llama family (Llama, Qwen2, Qwen3) over paged KV.

Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import LayerWeights, RopeTable, load_layer, rope_table, run_layer
from kvmesh.engine.weights import WeightFiles
from kvmesh.kernels import reference
from kvmesh.kernels.dispatch import StepAttention


@dataclass(frozen=True, slots=True)
class DenseModel:
    """Weights and the forward pass; holds no state of sequences.

    Attributes:
        embedding: [vocab, hidden].
        head: [vocab, hidden], the same tensor when the checkpoint ties them.
    """

    config: ModelConfig
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    rope: RopeTable

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Runs the rows of a step and writes their KV.

        Args:
            token_ids, positions: [rows] int64.

        Returns:
            [rows, hidden], before the last norm.
        """
        x = functional.embedding(token_ids, self.embedding)
        rope = RopeTable(self.rope.cos[positions], self.rope.signed_sin[positions])
        for layer, weights in enumerate(self.layers):
            run_layer(weights, self.config, layer, x, rope, attention)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token.

        Args:
            hidden: [rows, hidden] from `forward`.

        Returns:
            [rows, vocab] fp32, a tensor of its own.
        """
        normed = reference.rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return functional.linear(normed, self.head).float()


def load_model(
    files: WeightFiles, config: ModelConfig, *, num_positions: int, dtype: torch.dtype, device: str
) -> DenseModel:
    """Reads a model into device memory.

    Args:
        files: entered.
        num_positions: longest sequence that will be run.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """

    def matrix(name: str) -> Tensor:
        return files.read_rows([(name, config.vocab_size)], config.hidden_size, dtype, device)

    embedding = matrix("model.embed_tokens.weight")
    return DenseModel(
        config=config,
        embedding=embedding,
        layers=tuple(
            load_layer(files, config, layer, dtype, device) for layer in range(config.num_layers)
        ),
        norm=files.read_rows([("model.norm.weight", config.hidden_size)], None, dtype, device),
        head=embedding if config.tie_word_embeddings else matrix("lm_head.weight"),
        rope=rope_table(config.rope, config.head_dim, num_positions, dtype, device),
    )
