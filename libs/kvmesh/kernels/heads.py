"""Parameters of a layer's heads for the attention of a step: scores, norms and rotation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Attention parameters of one layer.

    Attributes:
        scale: factor of the scores.
        window: number of latest positions that a query sees, its own included; 0 for all.
        sinks: [heads] fp32, see `attention_reference.decode_attention`, or None.
        qk_norm: [heads + kv_heads, head_dim] weights of norms, or None.
        norm_eps: epsilon of `qk_norm`.
        cap: bound of soft-capping of scores, between -cap and cap; 0 for none.
    """

    scale: float
    window: int = 0
    sinks: Tensor | None = None
    qk_norm: Tensor | None = None
    norm_eps: float = 1e-6
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class RopeRows:
    """Rotary embedding of the rows of a step.

    Attributes:
        cos: [rows, 1, head_dim], contiguous, in the computation dtype.
        signed_sin: same shape, first half negated, as `reference.apply_rope` expects it.
    """

    cos: Tensor
    signed_sin: Tensor
