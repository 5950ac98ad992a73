from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.step_times import StepTimes, load_step_times
from kvmesh.policy.curves import Quadratic
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_runner import load_runner
from kvmesh.sim.profile_file import load_profile, shipped_profiles

TIMES = StepTimes(Quadratic(0.1, 0.01, 0.001), step_s=1.0, sequence_s=0.25, token_s=0.5)


def test_parts_of_a_prompt_take_together_what_the_whole_does() -> None:
    assert TIMES.of([(0, 6)]) + TIMES.of([(6, 10)]) == pytest.approx(TIMES.of([(0, 10)]))
    assert TIMES.of([(0, 10)]) == pytest.approx(0.1 + 0.1 + 0.1)


def test_decode_counts_its_sequences_and_their_context() -> None:
    assert TIMES.of([(9, 10), (29, 30)]) == pytest.approx(1.0 + 0.5 + 0.5 * 40)
    mixed = TIMES.of([(9, 10), (0, 10)])
    assert mixed == pytest.approx(TIMES.of([(9, 10)]) + TIMES.of([(0, 10)]))
    assert TIMES.of([]) == 0.0


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_device_has_the_times_that_the_simulator_reads(name: str) -> None:
    profile = load_profile(name)
    with resources.as_file(resources.files("kvmesh.sim.profiles") / f"{name}.json") as path:
        for device in profile.devices.values():
            times = load_step_times(path, device.name)
            assert times.of([(0, 5000)]) == pytest.approx(device.prefill_s(5000))
            decode = times.of([(999, 1000), (2999, 3000)])
            assert decode == pytest.approx(device.decode.step_s(2, 4000))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("{}", "no device 'a'; it has none"),
        ('{"devices": {"b": {}, "c": {}}}', "no device 'a'; it has b, c"),
        ('{"devices": {"a": {"decode_s": {}}}}', "prefill_s"),
        ('{"devices": {"a": {"prefill_s": {"points": [[1, 2]]}, "decode_s": {}}}}', "two or more"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_step_times(path, "a")


def test_the_fake_engine_takes_the_time_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    path = tmp_path / "profile.json"
    decode = {"constant": 0.5, "per_sequence": 0.25, "per_token": 0.0}
    device = {"prefill_s": {"quadratic": [1.0, 0.125]}, "decode_s": decode}
    path.write_text(json.dumps({"devices": {"mine": device}}))
    section = EngineSection(kind="fake", fake_profile=str(path), fake_device="mine",
                            fake_token_bytes=64)  # fmt: skip
    runner = load_runner(section)
    assert runner.spec.layout.block_bytes == 64 * section.block_size
    assert slept == [0.75], "the first step, before the worker joins"
    slept.clear()
    tokens = list(range(1, 20))
    for start, end in ((0, 16), (18, 19)):
        runner.execute([SequenceChunk(1, tokens, start, end, (0, 1), 19, SamplingParams(), False)])
    runner.close()
    assert slept == [3.0, 0.75]


@pytest.mark.parametrize("size", [0, 4, 12])
def test_a_position_has_whole_words(size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        load_runner(EngineSection(kind="fake", fake_token_bytes=size))
