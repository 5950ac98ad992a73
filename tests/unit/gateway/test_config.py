from __future__ import annotations

import pytest

from kvmesh.core.config import format_config, load_config, options_of
from kvmesh.core.errors import ConfigError
from kvmesh.policy.pdserve import timeout_s
from services.gateway.config import GatewayConfig, LimitsConfig


def test_flags_and_environment() -> None:
    config = load_config(
        GatewayConfig,
        ["--http.port", "0", "--limits.max-moves", "1"],
        environ={"KVMESH_SCHEDULER__TARGETS": "a:1,b:2", "KVMESH_ACCESS__API_KEYS": "sk-private"},
    )
    assert (config.http.port, config.limits.max_moves) == (0, 1)
    assert config.scheduler.targets == "a:1,b:2"
    assert "sk-private" not in format_config(config)


def test_waits_rise_with_the_length_of_prompts() -> None:
    limits = LimitsConfig(ttft_deadline_ms=9000, ttft_tiers="4096=4000, 256=1000")
    waits = [timeout_s(num_tokens, limits.tiers()) for num_tokens in (1, 256, 257, 4096, 4097)]
    assert waits == [1.0, 1.0, 4.0, 4.0, 9.0]
    assert timeout_s(1, LimitsConfig().tiers()) == 10.0


@pytest.mark.parametrize("tiers", ["256", "a=1", "256=0", "0=1", "256=-1", "256=1,256=2"])
def test_waits_that_cannot_be_read_are_told(tiers: str) -> None:
    with pytest.raises(ConfigError, match=r"limits.ttft_tiers is TOKENS=MS"):
        LimitsConfig(ttft_tiers=tiers).tiers()


@pytest.mark.parametrize("tiers", ["256=9001", "256=2000,512=1000"])
def test_a_shorter_prompt_does_not_wait_longer(tiers: str) -> None:
    with pytest.raises(ConfigError, match="waits must not fall with length"):
        LimitsConfig(ttft_deadline_ms=9000, ttft_tiers=tiers).tiers()


def test_every_option_says_what_it_is() -> None:
    assert all(option.help for option in options_of(GatewayConfig))
