"""Lightning attention in plain torch: a sum of keys times values that decays at one rate.

States and sums are fp32 whatever the inputs are. Tests: tests/unit/kernels/test_linear_states.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Number of positions that are computed at once.
_CHUNK = 128


def lightning_step(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes one position of several sequences: the state decays, adds `k` and `v`, answers `q`.

    Args:
        q, k: [sequences, heads, key_dim] fp32.
        v: [sequences, heads, value_dim] fp32.
        slopes: [heads] fp32, decrease of the state's logarithm per position.
        state: [sequences, heads, key_dim, value_dim] fp32.

    Returns:
        [sequences, heads, value_dim] and the new state.

    Source: Lightning Attention-2, arXiv 2401.04658 eq. 4.
    """
    state = state * torch.exp(-slopes)[:, None, None] + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def lightning_scan(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the positions of one sequence, many at once.

    Args:
        q, k: [positions, heads, key_dim] fp32.
        v: [positions, heads, value_dim] fp32.
        slopes: [heads] fp32.
        state: [heads, key_dim, value_dim] fp32, before the first position.

    Returns:
        [positions, heads, value_dim] and the state after the last.

    Source: arXiv 2401.04658 algorithm 1: inside a chunk by scores, across chunks by the state.
    """
    outs = []
    for begin in range(0, len(q), _CHUNK):
        heads_q, heads_k, heads_v = (x[begin : begin + _CHUNK].transpose(0, 1) for x in (q, k, v))
        steps = torch.arange(1, heads_q.shape[1] + 1, device=q.device)
        slope = slopes[:, None, None]
        gaps = (steps[:, None] - steps).clamp(min=0)
        scores = (heads_q @ heads_k.transpose(1, 2) * torch.exp(-slope * gaps)).tril()
        since = torch.exp(-slope * steps[:, None])
        outs.append(((heads_q * since) @ state + scores @ heads_v).transpose(0, 1))
        left = torch.exp(-slope * (steps[-1] - steps)[:, None])
        added = (heads_k * left).transpose(1, 2) @ heads_v
        state = state * torch.exp(-slope * steps[-1]) + added
    return torch.cat(outs), state
