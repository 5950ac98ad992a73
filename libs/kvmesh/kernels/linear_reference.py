"""Linear attention in plain torch: convolution and gated delta rule, which carry a state.

States and sums are fp32 whatever the inputs are. Tests: tests/unit/kernels/test_linear_states.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Number of positions that are computed at once; few, since per-channel decays need a cube of
# differences instead of a square.
_CHUNK = 64
_CHANNEL_CHUNK = 16


def causal_conv(x: Tensor, before: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convolves every channel with its latest inputs.

    Args:
        x: [..., positions, channels].
        before: [..., kernel - 1, channels], the inputs before `x`.
        weight: [kernel, channels], oldest input first.

    Returns:
        [..., positions, channels], and the inputs that the next call needs as `before`.
    """
    kernel, positions = len(weight), x.shape[-2]
    inputs = torch.cat([before, x], dim=-2)
    out = inputs[..., :positions, :] * weight[0]
    for tap in range(1, kernel):
        out += inputs[..., tap : tap + positions, :] * weight[tap]
    return out, inputs[..., positions:, :]


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scales the vectors of the last axis to length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes one position of the gated delta rule, for several sequences.

    The state decays, moves its answer for `k` towards `v` by the fraction beta, and answers `q`.

    Args:
        q, k: [sequences, heads, key_dim] fp32; `q` scaled.
        v: [sequences, heads, value_dim] fp32.
        decay: [sequences, heads, 1 or key_dim] fp32, logarithms.
        beta: [sequences, heads] fp32, the fraction.
        state: [sequences, heads, key_dim, value_dim] fp32.

    Returns:
        [sequences, heads, value_dim] and the new state.

    Source: Gated Delta Networks, arXiv 2412.06464 eq. 10; per channel, Kimi Linear, arXiv
        2510.26692 eq. 1.
    """
    state = state * decay.exp().unsqueeze(-1)
    known = (k.unsqueeze(-2) @ state).squeeze(-2)
    change = (v - known) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * change.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the gated delta rule over the positions of one sequence, many at once.

    Args:
        q, k: [positions, heads, key_dim] fp32; `q` scaled.
        v: [positions, heads, value_dim] fp32.
        decay: [positions, heads, 1 or key_dim] fp32, logarithms.
        beta: [positions, heads] fp32.
        state: [heads, key_dim, value_dim] fp32, before the first position.

    Returns:
        [positions, heads, value_dim] and the state after the last.

    Source: the WY form of arXiv 2412.06464 §3.3.
    """
    size = _CHUNK if decay.shape[-1] == 1 else _CHANNEL_CHUNK
    outs = []
    for begin in range(0, len(q), size):
        span = slice(begin, begin + size)
        heads_q, heads_k, heads_v, gone = (x[span].transpose(0, 1) for x in (q, k, v, decay))
        share = beta[span].T.unsqueeze(-1)
        out, state = _delta_chunk(heads_q, heads_k, heads_v, gone, share, state)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs), state


def _delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes one chunk of `delta_scan`, heads first; `beta` is [heads, positions, 1]."""
    # fp64: the total decay of a chunk may be thousands of times that between neighbours.
    total = decay.double().cumsum(1)
    products, reads = _decayed_products(q, k, total)
    # Each change depends on earlier ones: a triangular system, solved for all at once.
    system = beta * products.tril(-1)
    system = system + torch.eye(system.shape[-1], device=system.device)
    grown = total.float().exp()
    wanted = beta * (v - (k * grown) @ state)
    change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (q * grown) @ state + reads.tril() @ change
    last = total[:, -1:]
    left = (last - total).float().exp()
    state = state * last.float().exp().transpose(1, 2) + (k * left).transpose(1, 2) @ change
    return out, state


def _decayed_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `k_i · k_j` and `q_i · k_j`, decayed from j to i; upper triangles are meaningless.

    `total` is fp64, [heads, positions, 1 or key_dim], the logarithms' sums up to each position.
    Differences are taken before the exponential: the exponentials alone would overflow.
    """
    if total.shape[-1] == 1:
        gaps = (total - total.transpose(1, 2)).tril().float().exp()
        keys = k.transpose(1, 2)
        return k @ keys * gaps, q @ keys * gaps
    lower = torch.ones(k.shape[1], k.shape[1], device=k.device).tril()[..., None]
    gaps = ((total.unsqueeze(2) - total.unsqueeze(1)).float() * lower).exp()
    decayed = k.unsqueeze(1) * gaps
    return (k.unsqueeze(2) * decayed).sum(-1), (q.unsqueeze(2) * decayed).sum(-1)
