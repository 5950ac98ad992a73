"""Chooses when a prompt's KV leaves the prefill worker: per layer, per chunk or all at once. Pure.

Tests: tests/unit/policy/test_transfer_mode.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmesh.policy.link import LinkView


class TransferMode(enum.Enum):
    """When the KV of a prompt is sent."""

    WHOLE = "whole"
    """All blocks in one call, after the first token (FlowKV 3.3)."""
    CHUNKED = "chunked"
    """The blocks of each finished chunk, while the next one computes."""
    LAYERED = "layered"
    """As `CHUNKED`, and the last chunk's finished layers while its next layers compute.

    A block holds all its layers in one range of bytes, so a part of the layers needs one call per
    block. The layout (FlowKV eq. 5) avoids these calls otherwise; here they hide a transfer that
    nothing else can hide.
    """


@dataclass(frozen=True, slots=True)
class ModeDecision:
    """A transfer mode and the reason for it."""

    mode: TransferMode
    reason: str


@dataclass(frozen=True, slots=True)
class TransferTask:
    """The KV of one prompt to send.

    Attributes:
        num_bytes: KV to send.
        num_chunks: steps that compute the prompt; with 1 there is nothing to overlap with.
        last_bytes: KV of the last chunk, and the states of linear layers.
    """

    num_bytes: int
    num_chunks: int
    last_bytes: int = 0


FAST_ENOUGH_S = 0.002
"""Seconds up to which a whole transfer is sent at once: it is not worth interrupting the
compute."""


LAYERS_PAY_S = 0.02
"""Seconds to send the last chunk from which one call per block and group of layers pays."""


def choose_transfer_mode(task: TransferTask, link: LinkView | None) -> ModeDecision:
    """Chooses when to send a prompt's KV.

    Sending by chunks interrupts both workers' steps and hides the transfer of all chunks but the
    last, so it pays for long transfers. Sending by layers pays when even the last chunk is long.

    Args:
        task: the KV to send.
        link: the measured link to the receiver; None before the first transfer.
    """
    last_s = link.estimate_s(task.last_bytes) if link is not None else None
    if last_s is not None and last_s >= LAYERS_PAY_S:
        text = f"{last_s * 1e3:.1f} ms for the last chunk alone"
        return ModeDecision(TransferMode.LAYERED, text)
    if task.num_chunks <= 1:
        return ModeDecision(TransferMode.WHOLE, "one chunk: nothing to overlap with")
    estimate_s = link.estimate_s(task.num_bytes) if link is not None else None
    if estimate_s is None:
        return ModeDecision(TransferMode.CHUNKED, "the link's speed is not known yet")
    if estimate_s <= FAST_ENOUGH_S:
        return ModeDecision(TransferMode.WHOLE, f"{estimate_s * 1e3:.2f} ms in one call")
    return ModeDecision(TransferMode.CHUNKED, f"{estimate_s * 1e3:.1f} ms would follow the prompt")
