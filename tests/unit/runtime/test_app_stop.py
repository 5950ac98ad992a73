"""The last moment of a service: what is about to end may end, what hangs is not waited for."""

import asyncio

from kvmesh.runtime import app


async def test_a_task_that_is_about_to_end_ends_by_itself() -> None:
    release = asyncio.Event()
    call = asyncio.create_task(release.wait())
    asyncio.get_running_loop().call_soon(release.set)

    await app._let_tasks_end()

    assert call.done()
    assert not call.cancelled()


async def test_a_task_that_hangs_is_left_to_the_closing_loop() -> None:
    hanging = asyncio.create_task(asyncio.Event().wait())

    await asyncio.wait_for(app._let_tasks_end(), timeout=20 * app._LAST_TASKS_S)

    assert not hanging.done()
    hanging.cancel()
