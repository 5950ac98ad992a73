"""Workers without roles under limits per token: prompts and answers come apart, none is lost."""

from __future__ import annotations

import json
from pathlib import Path

from kvmesh.policy.ranking import AGGREGATE_TOKENS
from tests.chaos.load import Load, under_load
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import Flags, running_mesh

STEP_S, TOKEN_S = 0.06, 0.003
"""Of a decode step, and of a prompt's token. A step that a busy machine makes longer than the limit
would take prompts beside it again: its limits are missed in any case."""

TIGHT = {"x-slo-tpot-ms": "75"}
"""A step takes too much of it for prompts beside it."""


def profile(folder: Path) -> Path:
    """Step times of the engines."""
    file = folder / "profile.json"
    decode = {"constant": STEP_S, "per_sequence": 0.0, "per_token": 0.0}
    device = {"prefill_s": {"quadratic": [0.0, TOKEN_S, 0.0]}, "decode_s": decode}
    file.write_text(json.dumps({"devices": {"d": device}}))
    return file


def num_apart(load: Load) -> int:
    """How many prompts were computed elsewhere than their answers."""
    answers = [answer for _, _, answer in load.answers if answer.ok]
    return sum(each.prefill_worker != each.decode_worker for each in answers)


async def test_limits_take_prompts_and_answers_apart_and_kills_lose_none(tmp_path: Path) -> None:
    engine = {"engine.fake-profile": profile(tmp_path), "engine.fake-device": "d"}
    routing = {"routing.aggregate-tokens": AGGREGATE_TOKENS}  # as it is by default
    flags: dict[str, Flags] = {"scheduler": routing, "decode": {"worker.role": "hybrid", **engine}}
    async with running_mesh(tmp_path, 0, 3, flags=flags) as mesh, ApiClient(mesh.url) as client:
        async with under_load(client, num_clients=4) as load:
            await load.more(8)
        load.check_all_ok()
        assert num_apart(load) == 0
        # Of three workers one at least has no answers then.
        async with under_load(client, num_clients=2, max_tokens=20, headers=TIGHT) as load:
            await load.more(6)
            mesh["decode-1"].kill()
            await load.more(6)
            await mesh.restart("decode-1")
            await load.more(6)
        load.check_all_ok()
        assert num_apart(load) > len(load.answers) / 4
        await mesh.all_known()
        await mesh.idle()
