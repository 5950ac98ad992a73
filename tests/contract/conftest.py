"""A Redis for each test file, and the homes that one suite is run for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.contract.metadata_homes import Home, Memory, Redis
from tests.redis_server import redis_url


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_url(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(params=["memory", "redis"])
async def home(request: pytest.FixtureRequest) -> AsyncIterator[Home]:
    made: Home = Memory() if request.param == "memory" else Redis(request.getfixturevalue("url"))
    yield made
    await made.close()
