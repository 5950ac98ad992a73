"""Mamba-2 in plain torch: a sum of keys times values whose decay depends on the position.

Queries and keys are shared by groups of heads. States and sums are fp32 whatever the inputs are.
Source: Mamba-2, arXiv 2405.21060 §6. Tests: tests/unit/kernels/test_linear_states.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Number of positions that are computed at once.
_CHUNK = 64


def mamba_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes one position of several sequences: the state decays, adds `k` and `v`, answers `q`.

    Args:
        q, k: [sequences, groups, key_dim] fp32.
        v: [sequences, heads, value_dim] fp32.
        decay: [sequences, heads] fp32, logarithms.
        state: [sequences, heads, key_dim, value_dim] fp32.

    Returns:
        [sequences, heads, value_dim] and the new state.
    """
    shared = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(shared, dim=1), k.repeat_interleave(shared, dim=1)
    state = state * decay.exp()[..., None, None] + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def mamba_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the positions of one sequence, many at once.

    Args:
        q, k: [positions, groups, key_dim] fp32.
        v: [positions, heads, value_dim] fp32.
        decay: [positions, heads] fp32, logarithms.
        state: [heads, key_dim, value_dim] fp32, before the first position.

    Returns:
        [positions, heads, value_dim] and the state after the last.
    """
    groups, heads = k.shape[1], v.shape[1]
    outs = []
    # Heads of a group are an axis of their own, which shares queries and keys.
    matrix = state.view(groups, heads // groups, *state.shape[1:])
    for begin in range(0, len(q), _CHUNK):
        span = slice(begin, begin + _CHUNK)
        own_q, own_k = (x[span].transpose(0, 1).unsqueeze(1) for x in (q, k))
        values = v[span].transpose(0, 1).unflatten(0, (groups, -1))
        own = decay[span].T.unflatten(0, (groups, -1)).unsqueeze(-1)
        total = own.cumsum(2)
        # The decay between two positions is summed directly: as a difference of two large totals it
        # would lose precision.
        gaps = own.expand(-1, -1, -1, own.shape[2]).tril(-1).cumsum(2)
        scores = (own_q @ own_k.transpose(2, 3) * gaps.exp()).tril()
        out = (own_q @ matrix) * total.exp() + scores @ values
        outs.append(out.flatten(0, 1).transpose(0, 1))
        left = gaps[:, :, -1].unsqueeze(-1).exp()
        added = own_k.transpose(2, 3) @ (values * left)
        matrix = matrix * total[:, :, -1:].exp() + added
    return torch.cat(outs), matrix.reshape(state.shape)
