"""What people want to see and no decision reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelDetail:
    """What the scheduler's planner says about one model, for people.

    Attributes:
        remote_cluster: that long prompts are sent to; empty: none.
        threshold_tokens: longer uncached prompts go there; None without a remote cluster.
    """

    model: str
    remote_cluster: str = ""
    threshold_tokens: float | None = None
