"""Distribution of a prompt's work over its positions, from a model's shape.

Tests: tests/unit/engine/test_pair_share.py.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig


def pair_share(config: ModelConfig) -> float:
    """Returns the multiplications of attention to one position over all others of a token.

    A matrix takes one per weight; attention takes one per element of a key and of a value. The head
    is left out: it runs for only one position of a prompt.
    """
    attention = sum(_pair_elements(config, layer) for layer in range(config.num_layers))
    moe = config.moe
    chosen = None if moe is None else replace(moe, num_experts=moe.top_k)
    computing = replace(
        config, vocab_size=0, positions_before=None, layer_input_vocab=0, moe=chosen
    )
    return attention / max(computing.num_parameters, 1)


def _pair_elements(config: ModelConfig, layer: int) -> int:
    latent = config.latent
    if latent is not None:
        return config.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    return config.num_heads * 2 * config.head_shape(layer).head_dim
