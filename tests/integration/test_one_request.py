"""The page "one request in ten files" against what a request runs on its way through a mesh."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.runtime.worker_building import build_worker
from kvmesh.runtime.worker_config import EngineSection, WorkerConfig, WorkerSection
from kvmesh.runtime.worker_metrics import WorkerMetrics
from services.gateway.config import GatewayConfig, HttpConfig, ModelConfig, SchedulerTargets
from services.gateway.service import Gateway, start_gateway
from services.kvmanager.config import IndexConfig, KvManagerConfig
from services.kvmanager.service import build as build_kvmanager
from services.scheduler.config import KvManagerTarget, PlanningConfig, SchedulerConfig
from services.scheduler.service import start_scheduler
from tests.unit.gateway.tiny_model import write_model
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SERVER = ServerConfig(port=0)

Station = tuple[str, str]
"""A file of the repository and a function in it."""


class Calls:
    """The functions that are called, in the order of their first calls.

    Attributes:
        ways: for each function, the files on the stack of its first call.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.ways: dict[tuple[str, str], list[str]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        name = code.co_filename, code.co_qualname
        if not self.is_on or event != "call" or name in self.ways:
            return
        files: list[str] = []
        caller: FrameType | None = frame
        while caller is not None:
            files.append(caller.f_code.co_filename)
            caller = caller.f_back
        self.ways[name] = files

    @property
    def ours(self) -> dict[Station, set[str]]:
        """Functions of services and libraries in this order, with the files on their ways."""
        found: dict[Station, set[str]] = {}
        for (file, name), way in self.ways.items():
            if own := ours(file):
                found[own, name] = {path for each in way if (path := ours(each))}
        return found


def ours(file: str) -> str:
    """A file of services or libraries, from the repository's root; empty for others."""
    path = Path(file)
    is_ours = any(path.is_relative_to(ROOT / part) for part in ("services", "libs"))
    return str(path.relative_to(ROOT)) if is_ours else ""


@contextmanager
def noted_calls() -> Iterator[Calls]:
    """Notes calls in this thread, and in those that are started here."""
    calls = Calls()
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@asynccontextmanager
async def mesh(folder: Path) -> AsyncIterator[str]:
    """URL of a mesh in this process: one prefill worker, one decode worker, prefixes published."""
    async with AsyncExitStack() as stack:

        async def worker(config: WorkerConfig, context: ServiceContext) -> None:
            await build_worker(config, context, WorkerMetrics(CollectorRegistry()))

        async def scheduler(config: SchedulerConfig, context: ServiceContext) -> None:
            await start_scheduler(config, context)

        gateways: list[Gateway] = []

        async def gateway(config: GatewayConfig, context: ServiceContext) -> None:
            gateways.append(await start_gateway(config, context))

        index = KvManagerConfig(server=SERVER, index=IndexConfig(store="memory"))
        kvmanager = await stack.enter_async_context(serving("kvmanager", index, build_kvmanager))
        where = f"127.0.0.1:{kvmanager.port}"
        roles = SchedulerConfig(
            server=SERVER,
            planning=PlanningConfig(roles="off"),
            kvmanager=KvManagerTarget(target=where),
        )
        context = await stack.enter_async_context(serving("scheduler", roles, scheduler))
        target = f"127.0.0.1:{context.port}"
        for role in ("prefill", "decode"):
            section = WorkerSection(
                id=role, role=role, scheduler_targets=target, kvmanager_target=where
            )
            engine = EngineSection(kind="fake", model=str(folder), model_name="tiny")
            config = WorkerConfig(server=SERVER, worker=section, engine=engine)
            await stack.enter_async_context(serving("worker", config, worker))
        front = GatewayConfig(
            server=SERVER,
            http=HttpConfig(port=0),
            model=ModelConfig(path=str(folder), served_name="tiny"),
            scheduler=SchedulerTargets(targets=target, route_timeout_s=10.0),
        )
        await stack.enter_async_context(serving("gateway", front, gateway))
        await until(lambda: gateways[0].sessions.num_connected == 2, "the gateway is connected")
        yield f"http://127.0.0.1:{gateways[0].http_port}"


PAGE = (ROOT / "docs" / "one-request.md").read_text()
STATION = re.compile(r"\]\(\.\./([\w/]+\.py)\) \| `([\w.]+)` \|")
FILE = re.compile(r"\]\(\.\./([\w/]+\.py)\)")
BODY = {"model": "tiny", "max_tokens": 8, "stream": True, "ignore_eos": True}
HEADERS = {"x-kvmesh-placement": "disaggregated"}


def section(title: str) -> str:
    return PAGE.split(f"# {title}\n")[1].split("\n## ")[0]


def stations(title: str) -> dict[str, str]:
    """Files of a section of the page, each with its function."""
    return dict(STATION.findall(section(title)))


async def calls_of_one_request(folder: Path) -> Calls:
    """What a disaggregated chat calls until its answer is complete; it is not the first one."""
    write_model(folder)
    with noted_calls() as calls:
        async with mesh(folder) as url, aiohttp.ClientSession() as session:
            for is_noted in (False, True):
                words = f"{'this' if is_noted else 'another'} request, one handoff " * 8
                body = {**BODY, "messages": [{"role": "user", "content": words}]}
                post = session.post(f"{url}/v1/chat/completions", json=body, headers=HEADERS)
                calls.is_on = is_noted
                async with post as response:
                    assert response.status == 200
                    assert (await response.read()).endswith(b"data: [DONE]\n\n")
                calls.is_on = False
    return calls


async def test_the_page_tells_what_a_request_runs(tmp_path: Path) -> None:
    calls = await calls_of_one_request(tmp_path)
    ten, more = stations("One request in ten files"), stations("Ten more")
    listed = {**ten, **more}
    assert (len(ten), len(listed)) == (10, 20)
    assert sum(file.startswith("services/gateway/") for file in listed) <= 12

    order = calls.ours
    files = {file for file, _ in order}
    missing = [station for station in listed.items() if station not in order]
    assert not missing, f"the page names what is not called: {missing}"
    in_order = [station for station in order if station in ten.items()]
    assert in_order == list(ten.items()), "the page has another order"

    passed = set().union(*(order[station] for station in listed.items())) - listed.keys()
    between = set(FILE.findall(section("Between them")))
    assert passed <= between, f"the page does not name {passed - between}"
    assert len(passed) == 10, passed

    folders = set(re.findall(r"`((?:services|libs/kvmesh)/\w+)`", PAGE))
    strangers = [
        file
        for file in files
        if file not in listed and not any(file.startswith(f"{folder}/") for folder in folders)
    ]
    assert not strangers, f"the page names no folder of {strangers}"
    num_gateway = sum(file.startswith("services/gateway/") for file in files)
    told = re.search(r"about (\d+) files of this repository, about (\d+) of them", PAGE)
    assert told is not None
    # What runs beside it (a heartbeat, a report of load, another channel) differs between runs.
    assert abs(len(files) - int(told[1])) <= 25, len(files)
    assert abs(num_gateway - int(told[2])) <= 6, num_gateway
