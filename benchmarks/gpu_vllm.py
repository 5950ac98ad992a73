"""vLLM's steps over a KV pool on a device: whether its tokens are those of `vllm.LLM`.

    python -m benchmarks.gpu_vllm [--model DIR] [--save FILE]

Needs a CUDA device and vLLM's build for it (`pip install vllm==0.31.*`); a check that lacks one of
them has the result "not run" and the reason. Tests, with a device imitated in host memory:
tests/vllm/test_device_pool.py.
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
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.move_check import CheckedSequence, HeldBlocks
from kvmesh.engine.vllm_check import engine_environment, installation_problems
from kvmesh.engine.vllm_messages import EngineRequest
from kvmesh.kv.groups import num_blocks_of
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

_GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
_DRAWN = SamplingParams(
    temperature=0.9, seed=5, top_k=50, top_p=0.95, max_tokens=NEW_TOKENS, ignore_eos=True
)


def blocks_are_ranges(runner: VllmRunner) -> str:
    """A block has all layers, and each head is one range of it; otherwise loading is refused."""
    layout = runner.spec.layout
    return f"{layout.order}, {layout.block_bytes} bytes a block, {layout.num_kv_heads} heads"


def tokens_are_the_same(runner: VllmRunner, expected: Sequence[int]) -> str:
    """Greedy tokens over the pool are those of `vllm.LLM`."""
    found = _sequence(runner, 1, _GREEDY, first_block=3).tokens(NEW_TOKENS)
    return _compared(found, list(expected))


def moved_streams_go_on(runner: VllmRunner) -> str:
    """Seeded sampling goes on after the blocks went through the host to other ones."""
    expected = _sequence(runner, 2, _DRAWN, first_block=20).tokens(NEW_TOKENS)
    before = _sequence(runner, 3, _DRAWN, first_block=40)
    before.tokens(MOVED_AFTER)
    after = before.moved(4, _blocks(60), _pool(runner))
    return _compared(after.tokens(NEW_TOKENS), expected)


def handed_per_second(runner: VllmRunner) -> str:
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
    pool.computed()
    return f"{rates}, {_MOVED_BLOCKS} blocks of {block_bytes} bytes"


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
        device=0,
    )


def run(runner: VllmRunner, expected: Sequence[int]) -> list[Row]:
    """All checks; one that fails stops no other.

    Args:
        expected: greedy tokens of `vllm.LLM` after the prompt.
    """
    checks: Sequence[Callable[[], str]] = (
        lambda: blocks_are_ranges(runner),
        lambda: tokens_are_the_same(runner, expected),
        lambda: moved_streams_go_on(runner),
        lambda: handed_per_second(runner),
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
    default_environment(engine_environment(1, "cuda"))
    from kvmesh.engine.vllm_runner import VllmRunner  # noqa: PLC0415

    try:
        runner = VllmRunner.load(request_of(model, "bfloat16", graphs=True), "bench")
    except Exception as error:  # noqa: BLE001 vLLM raises whatever its parts do
        return [_failed(CHECKS[0], error), *not_run("loading failed")[1:]]
    found = run(runner, expected)
    runner.close()
    return found


def _sequence(
    runner: VllmRunner, number: int, sampling: SamplingParams, first_block: int
) -> CheckedSequence:
    return CheckedSequence(runner, number, prompt(), sampling, _blocks(first_block), PROMPT_TOKENS)


def _blocks(first_block: int) -> HeldBlocks:
    count = num_blocks_of(PROMPT_TOKENS + NEW_TOKENS, _BLOCK_SIZE)
    return HeldBlocks([range(first_block, first_block + count)])


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
