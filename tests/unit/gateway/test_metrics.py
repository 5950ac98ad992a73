from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvmesh.core.types import FinishReason
from services.gateway.metrics import GatewayMetrics


def test_names_that_dashboards_know() -> None:
    metrics = GatewayMetrics()
    tiny, other = metrics.of("tiny"), metrics.of("other")
    tiny.ttft_s.observe(0.003)
    tiny.finished(FinishReason.CANCELLED)
    other.prompt_tokens.inc(7)
    metrics.refused("busy", "prefill")
    metrics.moved("decode_failed")
    registry = CollectorRegistry()
    registry.register(metrics)
    text = generate_latest(registry).decode()
    for line in (
        'vllm:time_to_first_token_seconds_bucket{le="0.005",model_name="tiny"} 1.0',
        'vllm:request_success_total{finished_reason="abort",model_name="tiny"} 1.0',
        'vllm:prompt_tokens_total{model_name="tiny"} 0.0',
        'vllm:prompt_tokens_total{model_name="other"} 7.0',
        'kvmesh_gateway_refusals_total{reason="busy",stage="prefill"} 1.0',
        'kvmesh_gateway_moves_total{reason="decode_failed"} 1.0',
    ):
        assert line in text


def test_two_gateways_in_one_process_are_apart() -> None:
    first, second = GatewayMetrics(), GatewayMetrics()
    first.moved("x")
    assert first.value("kvmesh_gateway_moves_total", reason="x") == 1
    assert second.value("kvmesh_gateway_moves_total", reason="x") == 0
