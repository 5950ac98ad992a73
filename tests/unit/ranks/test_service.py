"""The service of one more host: which options it refuses, and what it makes of the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.rpc.channels import PeerTls
from kvmesh.runtime.app import ServerConfig, serving
from services.ranks import service
from services.ranks.config import RanksConfig, RanksSection
from services.ranks.service import build, credentials_of, leader_of
from tests.mesh_processes import MODEL_FOLDER

SECTION = RanksSection(leader="127.0.0.1:1", model=str(MODEL_FOLDER))


@pytest.mark.parametrize(
    ("target", "host", "port"),
    [("a:7003", "a", 7003), ("10.0.0.7:1", "10.0.0.7", 1), ("[fd00::7]:70", "fd00::7", 70)],
)
def test_the_leader_is_host_and_port(target: str, host: str, port: int) -> None:
    assert leader_of(target) == (host, port)


@pytest.mark.parametrize("target", ["", "a", "a:", ":7003", "a:b"])
def test_other_leaders_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=r"ranks\.leader is host:port"):
        leader_of(target)


def test_credentials_are_the_options() -> None:
    tls = PeerTls(ca="/ca")
    config = RanksConfig(
        server=ServerConfig(secret="s" * 40),
        ranks=RanksSection(tls=tls, peers=" prefill, decode ,"),
    )
    shown = credentials_of(config)
    assert (shown.tls, shown.peers, shown.secret) == (tls, ("prefill", "decode"), "s" * 40)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        (replace(SECTION, model=""), r"ranks\.model is empty"),
        (replace(SECTION, device="tpu"), "'tpu' is no device"),
        (replace(SECTION, device="cuda:40"), "cuda:40"),
    ],
)
async def test_wrong_options_end_the_start(section: RanksSection, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with serving("ranks", RanksConfig(ranks=section), build):
            pass


async def test_a_host_without_vllm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "engine_problems", lambda _: ["vLLM is not installed here"])
    with pytest.raises(ConfigError, match="vLLM is not installed here"):
        async with serving("ranks", RanksConfig(ranks=SECTION), build):
            pass


async def test_it_serves_while_it_waits_for_its_leader_and_drains_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "engine_problems", lambda _: [])
    with caplog.at_level("INFO"):
        async with serving("ranks", RanksConfig(ranks=SECTION), build) as context:
            while "waiting_for_leader" not in caplog.text:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(5.0):
                await context.drain(30.0)
