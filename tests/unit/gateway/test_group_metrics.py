from __future__ import annotations

from kvmesh.core.types import FinishReason
from kvmesh.policy.groups import GroupKey
from services.gateway.metrics import GatewayMetrics

CHAT, DOC = (GroupKey("m", "0123456789abcdef", scenario, "") for scenario in ("chat", "doc"))


def test_a_groups_requests_are_counted_under_its_key() -> None:
    metrics = GatewayMetrics()
    chat = metrics.of_group(CHAT)
    assert metrics.of_group(CHAT) is chat
    chat.ttft_s.observe(0.25)
    chat.ended(FinishReason.LENGTH, 2.0, 5)
    chat.ended(FinishReason.CANCELLED, 0.0, 1)  # one token has no time per token
    chat.refused("busy")
    metrics.of_group(DOC).refused("busy")
    labels = {"model_name": "m", "checkpoint": "01234567", "scenario": "chat"}

    def value(name: str, **more: str) -> float:
        return metrics.value(f"kvmesh_gateway_group_{name}", **labels, **more)

    assert value("ttft_seconds_sum") == 0.25
    assert (value("tpot_seconds_sum"), value("tpot_seconds_count")) == (0.5, 1)
    assert value("requests_total", finished_reason="length") == 1
    assert value("requests_total", finished_reason="abort") == 1
    assert value("refusals_total", reason="busy") == 1
