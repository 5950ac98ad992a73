"""Groups of a running `kvmesh up` are scaled, set up, upgraded and removed while requests run."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.stack_state import read_description
from tests.e2e.api_client import Answer, ApiClient
from tests.e2e.local_stack import (
    FEWER_TOKENS,
    another_checkpoint,
    group,
    member,
    running_up,
    watched,
)
from tests.mesh_processes import MODEL_FOLDER, fake_tokens
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CLIENTS = 3
TOKENS = 20
ONE_OF_EACH = ("--engine", "fake", "--prefill", "1", "--decode", "1")
CHAT = """
[[group]]
scenario = "chat"
prefill = 1
decode = 1
"""


async def groups(state: Path) -> dict[str, dict[str, Any]]:
    return {each["group"]: each for each in json.loads(await group(state, "list", "--json"))}


def names(shown: dict[str, Any]) -> list[str]:
    return [each["worker_id"] for each in shown["workers"]]


class Asked:
    """Clients of some scenarios, and what they were told."""

    def __init__(self, client: ApiClient, *scenarios: str) -> None:
        self._client = client
        self._scenarios = scenarios
        self.answers: list[tuple[list[int], int, Answer]] = []
        self.stopping = False

    async def run(self, number: int, scenario: str) -> None:
        draw = random.Random(f"{scenario} {number}")
        for seed in itertools.count(number * 1000):
            if self.stopping:
                return
            prompt = [draw.randrange(3, FEWER_TOKENS) for _ in range(draw.randint(20, 200))]
            headers = {"x-kvmesh-scenario": scenario}
            answer = await self._client.streamed(
                prompt, headers=headers, temperature=1.0, seed=seed, max_tokens=TOKENS
            )
            self.answers.append((prompt, seed, answer))

    async def more(self, count: int) -> None:
        goal = len(self.answers) + count
        await until(lambda: len(self.answers) >= goal, f"{count} more answers", 60)

    def checkpoints(self, *folders: Path) -> list[int]:
        """Of each answer, the place of the checkpoint that alone gives all of its tokens."""
        found = []
        for prompt, seed, answer in self.answers:
            assert answer.ok, (answer.status, answer.error)
            whole = [
                fake_tokens(prompt, TOKENS, temperature=1.0, seed=seed, folder=each)
                for each in folders
            ]
            assert answer.token_ids in whole, f"seed {seed} was answered by two checkpoints"
            found.append(whole.index(answer.token_ids))
        return found


@asynccontextmanager
async def asked(client: ApiClient, *scenarios: str) -> AsyncIterator[Asked]:
    """Clients at work; at the end all their requests are over."""
    load = Asked(client, *scenarios)
    async with asyncio.TaskGroup() as clients:
        for scenario, number in itertools.product(scenarios, range(CLIENTS)):
            clients.create_task(load.run(number, scenario))
        try:
            await load.more(len(scenarios) * CLIENTS)
            yield load
        finally:
            load.stopping = True


def is_new(state: Path, told: dict[str, Any]) -> bool:
    """Whether the scheduler is another process than it was."""
    now = read_description(state)
    return now is not None and member(now, "scheduler")["pid"] != member(told, "scheduler")["pid"]


@pytest.mark.long
async def test_a_group_grows_and_shrinks_under_load(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with (
        running_up(tmp_path, *ONE_OF_EACH) as told,
        ApiClient(f"http://{told['http']}") as client,
    ):
        assert (await groups(state))["any"]["state"] == "ready"
        async with asked(client, "") as load:
            await group(state, "scale", "any", "--decode", "2")
            assert names((await groups(state))["any"]) == ["decode-0", "decode-1", "prefill-0"]
            await load.more(10)
            workers = {answer.decode_worker for _, _, answer in load.answers}
            await group(state, "scale", "any", "--decode", "1")
            assert names((await groups(state))["any"]) == ["decode-0", "prefill-0"]
            await load.more(5)
        assert "decode-1" in workers
        assert set(load.checkpoints(MODEL_FOLDER)) == {0}


@pytest.mark.long
async def test_a_group_takes_an_empty_spare_and_gives_it_back(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with (
        running_up(tmp_path, *ONE_OF_EACH, "--empty-spare", "1") as told,
        ApiClient(f"http://{told['http']}") as client,
        watched(told) as view,
    ):
        pid = member(told, "empty-0")["pid"]
        async with asked(client, "") as load:
            await group(state, "scale", "any", "--decode", "2")
            assert names((await groups(state))["any"]) == ["decode-0", "empty-0", "prefill-0"]
            assert member(read_description(state) or {}, "empty-0")["pid"] == pid
            await until(lambda: not view.empty_spares, "it has its model")
            await load.more(10)
            workers = {answer.decode_worker for _, _, answer in load.answers}
            await group(state, "scale", "any", "--decode", "1")
            await until(lambda: [e.is_waiting for e in view.empty_spares] == [True], "it is empty")
            assert names((await groups(state))["any"]) == ["decode-0", "prefill-0"]
            await load.more(5)
        assert "empty-0" in workers
        assert set(load.checkpoints(MODEL_FOLDER)) == {0}


async def test_groups_are_set_up_upgraded_and_removed_under_load(tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "groups.toml"
    file.write_text(CHAT)
    new = another_checkpoint(tmp_path / "new")
    async with (
        running_up(tmp_path, *ONE_OF_EACH) as told,
        ApiClient(f"http://{told['http']}") as client,
    ):
        await group(state, "apply", str(file))
        async with asked(client, "", "chat") as load:
            await group(state, "upgrade", "chat", "--to", str(new), "--no-wait")
            # Whoever takes over finds the wish, and what was done of it.
            os.kill(member(told, "scheduler")["pid"], signal.SIGKILL)
            await until(lambda: is_new(state, told), "the scheduler is started again", 60)
            await load.more(5)
            await group(state, "upgrade", "chat", "--to", str(new))
            await group(state, "upgrade", "any", "--to", str(new))
            shown = await groups(state)
            assert {each["state"] for each in shown.values()} == {"ready"}
            assert {each["checkpoint"] for each in shown.values()} == {str(new)}
            assert all(len(each["workers"]) == 2 for each in shown.values())
            answered = len(load.answers)
            await load.more(10)
            await group(state, "remove", "chat")
            await load.more(5)
        assert list(await groups(state)) == ["any"]
        found = load.checkpoints(MODEL_FOLDER, new)
        assert found[0] == 0
        assert set(found[answered + 2 * CLIENTS :]) == {1}
