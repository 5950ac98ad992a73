"""Clients of a running `kvmesh up` whose answers can be checked, and what became of them.

Tests: tests/unit/benchmarks/test_fleet.py.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.fleet_engines import FleetEngine
from kvmesh.cli.scheduler_access import LiveFleet
from kvmesh.core.health import Health
from kvmesh.core.mesh_secret import load_secret
from kvmesh.core.summary_statistics import percentile
from kvmesh.core.types import Role
from kvmesh.rpc.channels import MeshAccess, open_channel
from kvmesh.v1 import scheduler_service_pb2 as pb
from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.e2e.api_client import Answer, ApiClient
from tests.e2e.local_stack import FEWER_TOKENS, member
from tests.mesh_processes import MODEL_FOLDER
from tests.waiting import until

WAIT_S = 200.0
SCENARIO = "x-kvmesh-scenario"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and its answer.

    Attributes:
        at: when it was sent, on the loop's clock.
        took_s: until the last token.
    """

    scenario: str
    prompt: Sequence[int]
    seed: int
    at: float
    took_s: float
    answer: Answer


@dataclass(slots=True)
class Clients:
    """They ask one request after the other until they are told to stop.

    Attributes:
        output_tokens: of each answer.
        lengths: of the shortest and the longest prompt, in tokens.
        engine: what answers.
    """

    client: ApiClient
    output_tokens: int
    lengths: tuple[int, int]
    engine: FleetEngine
    asked: list[Asked] = field(default_factory=list)
    stopping: bool = False

    async def run(self, scenario: str, number: int) -> None:
        """One client."""
        draw = random.Random(f"{scenario} {number}")
        loop = asyncio.get_running_loop()
        for seed in itertools.count(number * 100_000):
            if self.stopping:
                return
            count = draw.randint(*self.lengths)
            prompt = [draw.randrange(3, FEWER_TOKENS) for _ in range(count)]
            at = loop.time()
            answer = await self.client.streamed(
                prompt,
                headers={SCENARIO: scenario} if scenario else None,
                temperature=1.0,
                seed=seed,
                max_tokens=self.output_tokens,
                ignore_eos=True,
            )
            self.asked.append(Asked(scenario, prompt, seed, at, loop.time() - at, answer))

    async def more(self, count: int) -> None:
        """Waits for so many more answers."""
        goal = len(self.asked) + count
        await until(lambda: len(self.asked) >= goal, f"{count} more answers", WAIT_S)

    def failed(self, since: int = 0) -> int:
        """Requests without a whole answer."""
        return sum(not each.answer.ok for each in self.asked[since:])

    def wrong(self, *folders: Path, since: int = 0) -> int:
        """Answers whose tokens are not those of one of the checkpoints alone."""
        answered = [each for each in self.asked[since:] if each.answer.ok]
        return sum(not self._is_of_one(each, folders or (MODEL_FOLDER,)) for each in answered)

    def _is_of_one(self, asked: Asked, folders: Sequence[Path]) -> bool:
        return any(
            asked.answer.token_ids
            == self.engine.tokens(asked.prompt, self.output_tokens, asked.seed, folder)
            for folder in folders
        )


@asynccontextmanager
async def clients(
    url: str,
    engine: FleetEngine,
    scenarios: Mapping[str, int],
    output_tokens: int,
    lengths: tuple[int, int] = (20, 200),
) -> AsyncIterator[Clients]:
    """Clients at work, so many of each scenario; at the end all their requests are over."""
    async with ApiClient(url) as client:
        load = Clients(client, output_tokens, lengths, engine)
        async with asyncio.TaskGroup() as tasks:
            for scenario, count in scenarios.items():
                for number in range(count):
                    tasks.create_task(load.run(scenario, number))
            try:
                await load.more(sum(scenarios.values()))
                yield load
            finally:
                load.stopping = True


def p99_ms(asked: Sequence[Asked]) -> float:
    """Of the times to the last token."""
    return round(1e3 * percentile([each.took_s for each in asked], 99), 1)


def serving(view: LiveFleet, role: Role, scenario: str = "") -> set[tuple[str, int]]:
    """Lives of the workers that take requests in a role of a group."""
    return {
        (each.info.worker_id, each.info.incarnation)
        for each in view.workers
        if (each.info.role, each.info.scenario) == (role, scenario)
        and each.health < Health.DEGRADED
    }


class Schedulers:
    """Asks the scheduler of a stack for its groups, also while it is started again."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._target = str(member(dict(told), "scheduler")["address"])
        self._access = MeshAccess(secret=load_secret(told["secret_file"]))

    async def groups(self) -> dict[str, pb.GroupView]:
        """By scenario; none while nobody answers."""
        async with open_channel(self._target, self._access) as channel:
            try:
                answer = await SchedulerServiceStub(channel).ListGroups(
                    pb.ListGroupsRequest(), timeout=2.0
                )
            except grpc.aio.AioRpcError:  # it was killed: that is what is measured
                return {}
        return {view.wish.scenario: view for view in answer.groups}


def say(text: str) -> None:
    """Progress for people."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()
