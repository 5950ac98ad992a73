"""What a tenant's prompts leave in caches brings nobody else a first token sooner.

Times are told apart by a bound that a busy machine cannot break: the fake engine's prefill sleeps.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from kvmesh.policy.quota import TenantLimits
from tests.e2e.test_prefix_cache import a_prompt
from tests.integration.test_gateway_tenants import write_tenants
from tests.mesh_processes import BLOCK_SIZE, MODEL, running_mesh

TOKEN_S = 4e-4
CACHED = 20 * BLOCK_SIZE
NUM_TOKENS = CACHED + 5
TRIES = 8


async def first_token(
    session: aiohttp.ClientSession, tenant: str, prompt: list[int], salt: str = ""
) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt were cached."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
    }
    headers = {"Authorization": f"Bearer key-{tenant}"}
    begun = time.perf_counter()
    async with session.post("/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        assert (await answer.content.readline()).startswith(b"data: {")
        seconds = time.perf_counter() - begun
        lines = (await answer.read()).splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return seconds, chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_no_first_token_tells_what_another_tenant_asked(tmp_path: Path) -> None:
    decode = {"constant": 0.0, "per_sequence": 0.0, "per_token": 0.0}
    device = {"prefill_s": {"quadratic": [0.0, TOKEN_S, 0.0]}, "decode_s": decode}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"devices": {"slow": device}}))
    access = await write_tenants(
        tmp_path / "tenants.json", {"a": TenantLimits(), "b": TenantLimits()}
    )
    flags: dict[str, dict[str, object]] = {
        "prefill": {"engine.fake-profile": profile, "engine.fake-device": "slow"},
        "gateway": {"access.tenants-file": access.tenants_file},
    }
    askers = {
        "first": ("a", ""),
        "another tenant": ("b", ""),
        "another user": ("a", "user"),
        "again": ("a", ""),
    }
    times: dict[str, list[float]] = {who: [] for who in askers}
    async with (
        running_mesh(tmp_path, 1, 1, flags=flags) as mesh,
        aiohttp.ClientSession(mesh.url) as session,
    ):
        for number in range(TRIES):
            prompt = a_prompt(1000 + number, NUM_TOKENS)
            for who, (tenant, salt) in askers.items():
                seconds, cached = await first_token(session, tenant, prompt, salt)
                assert cached == (CACHED if who == "again" else 0), who
                times[who].append(seconds)
    print({who: round(median(taken), 4) for who, taken in times.items()})
    whole_s = TOKEN_S * NUM_TOKENS
    assert min(times["again"]) < whole_s / 2, "else times would tell nothing"
    del times["again"]
    assert {who: min(taken) >= whole_s for who, taken in times.items()} == dict.fromkeys(
        times, True
    )
