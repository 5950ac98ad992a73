"""When the KV of a prompt leaves the prefill worker. Pure.

Tests: tests/unit/policy/test_transfer_mode.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmesh.policy.link import LinkView


class TransferMode(enum.Enum):
    """What leaves when."""

    WHOLE = "whole"
    """All blocks in one call, after the first token."""
    CHUNKED = "chunked"
    """The blocks of each finished chunk, while the next one computes."""
    LAYERED = "layered"
    """As chunked, and of the last chunk the layers that are computed, while the next ones are.

    A block holds all layers in one range of bytes, so some layers of a run are as many pieces as
    it has blocks: the calls that the layout was made to avoid, for a transfer that nothing else
    can hide.
    """


@dataclass(frozen=True, slots=True)
class ModeDecision:
    """A mode and why."""

    mode: TransferMode
    reason: str


@dataclass(frozen=True, slots=True)
class TransferTask:
    """What is to be moved.

    Attributes:
        num_bytes: KV to send.
        num_chunks: steps that the prompt is computed in; 1 leaves nothing to overlap with.
        last_bytes: KV of the last of them.
        has_layers: both ends can move some layers of a block.
    """

    num_bytes: int
    num_chunks: int
    last_bytes: int = 0
    has_layers: bool = False


FAST_ENOUGH_S = 0.002
"""A transfer this short is not worth an interruption of the computation."""


LAYERS_PAY_S = 0.02
"""A last chunk that takes this long to send is worth a call per block and group of layers."""


def choose_transfer_mode(task: TransferTask, link: LinkView | None) -> ModeDecision:
    """Chunked pays when the transfer is long enough to be seen behind the last chunk.

    Sending a chunk costs both workers some time in the middle of their steps; what it hides is the
    transfer of all chunks but the last. Layers pay when even the last one is long.

    Args:
        task: what is to be moved.
        link: the way there; None before anything was sent.
    """
    last_s = link.estimate_s(task.last_bytes) if link is not None else None
    if task.has_layers and last_s is not None and last_s >= LAYERS_PAY_S:
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
