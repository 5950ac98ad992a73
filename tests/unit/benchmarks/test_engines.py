from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.engines.ctranslate2 import Turns


def test_a_step_ends_with_its_last_row_and_waits_for_the_next_to_be_asked_for() -> None:
    turns = Turns(2)
    with ThreadPoolExecutor(1) as generator:
        assert not generator.submit(turns.on_token, None).result()
        with pytest.raises(queue.Empty):
            turns.seconds.get(block=False)
        last = generator.submit(turns.on_token, None)
        assert turns.seconds.get(timeout=5) > 0
        assert not last.done()
        turns.go_on.put(True)
        assert not last.result(timeout=5)


def test_rows_of_a_generation_that_is_given_up_end() -> None:
    turns = Turns(2)
    with ThreadPoolExecutor(1) as generator:
        generator.submit(turns.on_token, None).result()
        last = generator.submit(turns.on_token, None)
        turns.seconds.get(timeout=5)
        turns.go_on.put(False)
        assert last.result(timeout=5)
        assert generator.submit(turns.on_token, None).result(), "the rows that were before it"
    with pytest.raises(queue.Empty):
        turns.seconds.get(block=False)
