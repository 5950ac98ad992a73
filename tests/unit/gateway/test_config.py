from __future__ import annotations

from kvmesh.core.config import format_config, load_config, options_of
from services.gateway.config import GatewayConfig


def test_flags_and_environment() -> None:
    config = load_config(
        GatewayConfig,
        ["--http.port", "0", "--limits.max-moves", "1"],
        environ={"KVMESH_SCHEDULER__TARGETS": "a:1,b:2", "KVMESH_ACCESS__API_KEYS": "sk-private"},
    )
    assert (config.http.port, config.limits.max_moves) == (0, 1)
    assert config.scheduler.targets == "a:1,b:2"
    assert "sk-private" not in format_config(config)


def test_every_option_says_what_it_is() -> None:
    assert all(option.help for option in options_of(GatewayConfig))
