"""vLLM's steps over a KV pool on a device: what has to hold before workers may offer it.

    python -m benchmarks.gpu_vllm [--model DIR] [--save FILE]

Needs a CUDA device and vLLM's build for it (`pip install vllm==0.31.*`); a check that lacks one of
them has the result "not run" and the reason. Workers refuse vLLM on a device until all checks have
passed on one. Tests, with a device imitated in host memory: tests/vllm/test_device_pool.py.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.result import RESULTS, ROOT, Row, document, markdown, save
from kvmesh.core.config import default_environment
from kvmesh.core.types import SamplingParams
from kvmesh.engine.device_driver import CudaDriver, DeviceDriver
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.vllm_check import engine_environment, installation_problems
from kvmesh.engine.vllm_messages import EngineRequest
from kvmesh.transfer.device import pieces_of
from kvmesh.transfer.memory import create_shared

if TYPE_CHECKING:
    from kvmesh.engine.vllm_runner import VllmRunner

MODEL = ROOT / "models" / "pydoc-6m"
PROMPT_TOKENS, NEW_TOKENS, MOVED_AFTER = 150, 24, 9
_VOCAB = 4096
_BLOCK_SIZE = 32
_NUM_BLOCKS = 512
_MOVED_BLOCKS, _REPEATS = 128, 7
_ORDER = {"VLLM_KV_CACHE_LAYOUT": "BHLNC"}

_GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
_DRAWN = SamplingParams(
    temperature=0.9, seed=5, top_k=50, top_p=0.95, max_tokens=NEW_TOKENS, ignore_eos=True
)


def blocks_are_ranges(runner: VllmRunner) -> str:
    """A block has all layers, and each head is one range of it; else loading is refused."""
    layout = runner.spec.layout
    return f"{layout.order}, {layout.block_bytes} bytes a block, {layout.num_kv_heads} heads"


def tokens_are_the_same(runner: VllmRunner, expected: Sequence[int]) -> str:
    """Greedy tokens over the pool are those of `vllm.LLM`."""
    found = _Stream(runner, 1, _GREEDY, first_block=3).tokens(NEW_TOKENS)
    return _compared(found, list(expected))


def moved_streams_go_on(runner: VllmRunner, driver: DeviceDriver) -> str:
    """Seeded sampling goes on after the blocks went through the host to other ones."""
    expected = _Stream(runner, 2, _DRAWN, first_block=20).tokens(NEW_TOKENS)
    before = _Stream(runner, 3, _DRAWN, first_block=40)
    before.tokens(MOVED_AFTER)
    after = before.moved(4, first_block=60, driver=driver)
    return _compared(after.tokens(NEW_TOKENS), expected)


def handed_per_second(runner: VllmRunner, driver: DeviceDriver) -> str:
    """Blocks that lie apart, into memory of the host and out of it."""
    pool, block_bytes = _pool(runner), runner.spec.layout.block_bytes
    num_bytes = _MOVED_BLOCKS * block_bytes
    apart = pieces_of([(2 * number, 1) for number in range(_MOVED_BLOCKS)], block_bytes, None)
    _, memory = create_shared("bench", num_bytes)
    staging = pool.staging(memoryview(memory))

    def out() -> None:
        staging.gather(apart, 0, block_bytes, pool.moment())

    def back() -> None:
        staging.scatter(0, apart, pool.moment())

    rates = ", ".join(
        f"{name} {num_bytes / _seconds(move) / 1e9:.2f} GB/s"
        for name, move in (("out", out), ("in", back))
    )
    staging.close()
    driver.mark()
    return f"{rates}, {_MOVED_BLOCKS} blocks of {block_bytes} bytes"


class _Stream:
    """A sequence over blocks of its own that follow each other.

    Args:
        number: unlike that of any other sequence of the runner.
        first_block: of as many as it may need.
    """

    def __init__(
        self, runner: VllmRunner, number: int, sampling: SamplingParams, first_block: int
    ) -> None:
        self._runner, self._number, self._sampling = runner, number, sampling
        count = -(-(PROMPT_TOKENS + NEW_TOKENS) // _BLOCK_SIZE)
        self._table = range(first_block, first_block + count)
        self._tokens = prompt()
        self._computed = 0

    def tokens(self, count: int) -> list[int]:
        """Goes on until there are so many tokens after the prompt, and returns them."""
        while (end := len(self._tokens)) < PROMPT_TOKENS + count:
            chunk = SequenceChunk(
                self._number,
                self._tokens,
                self._computed,
                end,
                self._table,
                PROMPT_TOKENS,
                self._sampling,
                sample=True,
            )
            (token,) = self._runner.execute([chunk]).tokens
            assert token is not None, "it was asked for"
            self._tokens.append(token.token_id)
            self._computed = end
        return self._tokens[PROMPT_TOKENS:]

    def moved(self, number: int, first_block: int, driver: DeviceDriver) -> _Stream:
        """The same sequence in other blocks, whose bytes went through the host; this one ends."""
        pool, block_bytes = _pool(self._runner), self._runner.spec.layout.block_bytes
        other = _Stream(self._runner, number, self._sampling, first_block)
        other._tokens, other._computed = self._tokens, self._computed
        count = len(self._table)
        old, new = (
            pieces_of([(table[0], count)], block_bytes, None)
            for table in (self._table, other._table)
        )
        _, memory = create_shared("moved", 2 * count * block_bytes)
        staging = pool.staging(memoryview(memory))
        staging.gather(old, 0, block_bytes, pool.moment())
        staging.scatter(0, new, pool.moment())
        # A read of the old blocks returns zeros from here on.
        staging.scatter(count * block_bytes, old, pool.moment())
        staging.close()
        driver.mark()
        self._runner.forget([self._number])
        return other


CHECKS = (
    "blocks are one range each (BHLNC) under the device's attention",
    "greedy tokens over a device pool: those of vllm.LLM",
    "seeded tokens after a move through the host, steps as CUDA graphs: those of no move",
    "handed over",
)


def prompt() -> list[int]:
    """The prompt of all checks."""
    draw = random.Random(1)
    return [draw.randrange(5, _VOCAB) for _ in range(PROMPT_TOKENS)]


def request_of(model: Path, dtype: str, *, graphs: bool) -> EngineRequest:
    """The engine of all checks."""
    return EngineRequest(
        folder=model,
        dtype=dtype,
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        max_model_len=1024,
        max_tokens=512,
        max_sequences=16,
        graphs=graphs,
    )


def run(runner: VllmRunner, driver: DeviceDriver, expected: Sequence[int]) -> list[Row]:
    """All checks; one that fails stops no other.

    Args:
        expected: greedy tokens of `vllm.LLM` after the prompt.
    """
    checks: Sequence[Callable[[], str]] = (
        lambda: blocks_are_ranges(runner),
        lambda: tokens_are_the_same(runner, expected),
        lambda: moved_streams_go_on(runner, driver),
        lambda: handed_per_second(runner, driver),
    )
    return [_row(name, check) for name, check in zip(CHECKS, checks, strict=True)]


def not_run(reason: str) -> list[Row]:
    """The rows where nothing could be run."""
    return [{"check": name, "result": f"not run: {reason}"} for name in CHECKS]


def greedy(model: Path, dtype: str) -> list[int]:
    """What `vllm.LLM` generates after the prompt, in its own order of the cache."""
    import vllm  # noqa: PLC0415 - after the environment is set

    llm = vllm.LLM(
        model=str(model),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        enforce_eager=True,
        block_size=_BLOCK_SIZE,
        kv_cache_memory_bytes=1 << 28,
        seed=0,
    )
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    (found,) = llm.generate([{"prompt_token_ids": prompt()}], sampling, use_tqdm=False)
    return list(found.outputs[0].token_ids)


def main() -> None:
    """Checks, and writes the result; fails when a check did."""
    options = _parse()
    rows = _measured(options.model) if not (reason := _missing()) else not_run(reason)
    result = document(rows, [], 0, [f"{options.model.name}, blocks of {_BLOCK_SIZE} positions"])
    save(result, options.save)
    sys.stdout.write(markdown(result))
    sys.exit(any(row["result"].startswith("FAILED") for row in rows))


def _missing() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "; ".join(installation_problems())


def _measured(model: Path) -> list[Row]:
    default_environment(engine_environment(1))
    expected = greedy(model, "bfloat16")
    # Read when the next engine is made.
    default_environment(_ORDER)
    from kvmesh.engine.vllm_runner import VllmRunner  # noqa: PLC0415

    driver = CudaDriver("cuda")
    try:
        request = request_of(model, "bfloat16", graphs=True)
        runner = VllmRunner.load(request, "bench", driver)
    except Exception as error:  # noqa: BLE001 vLLM raises whatever its parts do
        return [_failed(CHECKS[0], error), *not_run("loading failed")[1:]]
    found = run(runner, driver, expected)
    runner.close()
    return found


def _row(name: str, check: Callable[[], str]) -> Row:
    try:
        return {"check": name, "result": check()}
    except Exception as error:  # noqa: BLE001 the rows after it are worth having
        return _failed(name, error)


def _failed(name: str, error: Exception) -> Row:
    return {"check": name, "result": f"FAILED: {type(error).__name__}: {error}"}


def _compared(found: list[int], expected: list[int]) -> str:
    if found != expected:
        at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise ValueError(f"token {at} of {len(expected)} is {found[at]}, not {expected[at]}")
    return f"{len(found)} tokens equal"


def _seconds(work: Callable[[], None]) -> float:
    """The middle one of some calls, after one that is not counted."""
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _pool(runner: VllmRunner) -> DeviceKvPool:
    assert isinstance(runner.kv, DeviceKvPool), "the pool is on a device"
    return runner.kv


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--save", type=Path, default=RESULTS / "gpu_vllm.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
