"""A worker whose process lives and whose engine does not: it is ejected before clients notice."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.chaos.load import under_load
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import Mesh, running_mesh
from tests.waiting import until

ILL = "decode-0"
SLOTS = 4
STEP = {"engine.fake-step-s": 0.05, "worker.decode-slots": SLOTS}
NUM_EACH = 4
NUM_CLIENTS = 10
EJECTED_WITHIN_S = 3.0


def ejections(mesh: Mesh) -> list[tuple[str, float]]:
    """Workers that were ejected, and when, in seconds since the epoch."""
    return [
        (line["worker_id"], datetime.fromisoformat(line["time"]).timestamp())
        for line in mesh["scheduler"].events()
        if line["event"] == "worker_health" and line["health"] in ("degraded", "dead")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ill", ["prefill-0", "decode-0"])
async def test_a_worker_that_computes_no_numbers_is_ejected_and_others_answer(
    tmp_path: Path, ill: str
) -> None:
    flags = {"prefill": STEP, "decode": STEP}
    async with (
        running_mesh(tmp_path, 2, 2, flags=flags, faulty=[ill]) as mesh,
        ApiClient(mesh.url) as client,
    ):
        async with under_load(client) as load:
            began = time.time()
            mesh.fault(ill, "nan")
            await until(lambda: ejections(mesh), f"{ill} is ejected")
            await load.more(20)
        (name, at), *others = ejections(mesh)
        assert (name, others) == (ill, [])
        assert at - began <= EJECTED_WITHIN_S
        load.check_all_ok()
        reasons = [each["fault"] for each in mesh["scheduler"].events() if "fault" in each]
        # Whichever is told first: its own report, or the gateway whose requests it failed.
        assert reasons[-1] in {
            "it computes logits that are not numbers",
            "gateways lose requests there",
        }
        gateway = await mesh["gateway"].metrics()
        assert 1 <= gateway.value("kvmesh_gateway_moves_total") <= 2 * SLOTS


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", pytest.param("slow 10", marks=pytest.mark.long)])
async def test_an_ill_engine_is_ejected_within_three_seconds(tmp_path: Path, fault: str) -> None:
    flags = {"prefill": STEP, "decode": STEP}
    async with (
        running_mesh(tmp_path, NUM_EACH, NUM_EACH, flags=flags, faulty=[ILL]) as mesh,
        ApiClient(mesh.url) as client,
    ):
        async with under_load(client, num_clients=NUM_CLIENTS) as load:
            await load.more(40)
            began = time.time()
            mesh.fault(ILL, fault)
            await until(lambda: ejections(mesh), f"{ILL} is ejected")
            answered = len(load.answers)
            await load.more(40)
        (_, at), *_ = ejections(mesh)
        assert {name for name, _ in ejections(mesh)} == {ILL}, "one that is slow may hang then"
        assert at - began <= EJECTED_WITHIN_S
        load.check_all_ok()
        gateway = await mesh["gateway"].metrics()
        moves = gateway.value("kvmesh_gateway_moves_total")
        assert moves <= SLOTS, "no more met it than it has slots"
        if fault == "hang":
            assert moves >= 1
        # A slow engine may end what it has; nothing new comes to it.
        late = [answer.decode_worker for _, _, answer in load.answers[answered:]]
        assert late.count(ILL) <= SLOTS
        mesh[ILL].kill()  # its engine would not let it end
