from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import chain_load
from benchmarks.chain_load import NUM_CLIENTS, TTFT_S, loaded, model_folder, targets


async def test_a_prompt_that_is_late_is_not_good_and_a_refused_one_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain_load, "RETRY_S", 0.0)
    answers = iter([1.0, None, 2 * TTFT_S, None, None, 2.0, 3.0])
    most = running = 0

    async def ask() -> float | None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(0)
            return next(answers, 1.0)
        finally:
            running -= 1

    good, seconds = await loaded(ask, 5)
    assert good == 4
    assert seconds > 0
    assert most == NUM_CLIENTS
    assert running == 0


async def test_an_error_ends_the_load() -> None:
    async def ask() -> float | None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await loaded(ask, 5)


def test_the_middle_round_is_judged() -> None:
    rows = [{"goodput/s": {"min": 0.9, "median": 0.995, "max": 1.1}}]
    assert [each.met for each in targets(rows)] == [True]


def test_the_model_reads_the_embedded_tokens(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, 0)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert len(tokenizer["model"]["vocab"]) <= config["vocab_size"]
