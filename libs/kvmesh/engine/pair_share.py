"""Distribution of a prompt's work over its positions, from a model's shape.

Tests: tests/unit/engine/test_pair_share.py.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig

_LEAST = 1e-9
"""Result for a model whose layers all have windows or states; 0 would mean: never split."""


def pair_share(config: ModelConfig) -> float:
    """Returns the multiplications of attention to one position, divided by a token's other ones.

    A matrix takes one for each of its weights; attention takes one for each element of a key and of
    a value. The work of layers with a window or a state does not depend on the token's position.
    The head is left out: it runs for one position of a prompt.
    """
    pairs = constant = 0
    for layer in range(config.num_layers):
        if config.is_linear(layer):
            constant += config.state_values
        if config.has_attention(layer):
            window, elements = config.windows[layer], _pair_elements(config, layer)
            pairs += 0 if window else elements
            constant += window * elements
    moe = config.moe
    chosen = None if moe is None else replace(moe, num_experts=moe.top_k)
    computing = replace(
        config, vocab_size=0, positions_before=None, layer_input_vocab=0, moe=chosen
    )
    return max(pairs / max(computing.num_parameters + constant, 1), _LEAST)


def _pair_elements(config: ModelConfig, layer: int) -> int:
    latent = config.latent
    if latent is not None:
        return config.num_heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    return config.num_heads * 2 * config.head_shape(layer).head_dim
