"""How heads attend and are turned: what a layer says to the attention of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How one layer attends.

    Attributes:
        scale: factor of the scores.
        window: latest positions that a query sees, its own among them; 0 for all.
        sinks: [heads] fp32, see `attention_reference.decode_attention`, or None.
        qk_norm: [heads + kv_heads, head_dim] or None.
        norm_eps: of `qk_norm`.
        cap: scores are bent to stay between -cap and cap; 0 for not.
    """

    scale: float
    window: int = 0
    sinks: Tensor | None = None
    qk_norm: Tensor | None = None
    norm_eps: float = 1e-6
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class RopeRows:
    """Rotation of the rows of a step.

    Attributes:
        cos: [rows, 1, head_dim], contiguous, in the computation dtype.
        signed_sin: the same shape, first half negated, as `reference.apply_rope` wants it.
    """

    cos: Tensor
    signed_sin: Tensor
