"""A gateway dies under streams, and no client loses or repeats a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.gateway_kills import Streams, chaos, learn, two_gateways

pytestmark = pytest.mark.timeout(240)


async def test_streams_outlive_their_gateways(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (_, gateways):
        streams = Streams(await learn(gateways, seed=2, shortest=60, longest=120))
        await chaos(gateways, streams, num_kills=4, num_clients=12, seed=2)
    assert streams.wrong == []
    assert gateways.done == {"process": 2, "parent": 1, "port": 1}
    assert streams.num_cuts > 0
    assert set(streams.kinds) == {"SDK", "blocking SDK", "events", "scored events"}
