from __future__ import annotations

import asyncio
import json

import pytest

from services.gateway.api.token_routes import TOKENS_PER_TURN, json_list


@pytest.mark.parametrize("count", [0, 1, TOKENS_PER_TURN, 3 * TOKENS_PER_TURN + 1])
async def test_a_list_is_that_of_json(count: int) -> None:
    assert json.loads(await json_list(range(count), str)) == [str(each) for each in range(count)]
    assert json.loads(await json_list(range(count), int)) == list(range(count))


async def test_others_have_their_turn_while_a_long_list_is_made() -> None:
    told: list[int] = []

    def tell(token_id: int) -> int:
        told.append(token_id)
        return token_id

    making = asyncio.ensure_future(json_list(range(3 * TOKENS_PER_TURN), tell))
    seen = []
    while not making.done():
        await asyncio.sleep(0)
        seen.append(len(told) // TOKENS_PER_TURN)
    assert {1, 2, 3} <= set(seen)
