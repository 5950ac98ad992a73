"""What an engine of some ranks says, as JSON: vLLM has one number of ranks in a process.

python -m tests.vllm.said_by NUM_RANKS NUM_STAGES sockets|memory|devices|hosts [ADAPTER ADAPTER]

With two folders of adapters, the first one is loaded at start and the other one later.

python -m tests.vllm.said_by NUM_RANKS NUM_STAGES ADDRESS:PORT SECRET_FILE

Here each rank but the first is another host's, which connects to this address.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmesh.core.errors import CheckpointError
from kvmesh.core.mesh_secret import load_secret
from kvmesh.core.process_end import end_process
from kvmesh.core.types import SamplingParams
from kvmesh.engine.adapters import Adapter, read_adapter
from kvmesh.engine.protocol import ModelRunner, SequenceChunk
from kvmesh.engine.rank_host import Builds
from kvmesh.engine.rank_lines import RankAccess, RankGate
from tests.engine_alone import generated
from tests.mesh_processes import MODEL_FOLDER
from tests.vllm.oracle import some_prompts
from tests.vllm_engine import BLOCK_SIZE, load_vllm

if TYPE_CHECKING:
    from kvmesh.engine.vllm_runner import VllmRunner

PROMPTS = some_prompts(12, 400, seed=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

_DRAWN = SamplingParams(
    temperature=0.9, seed=11, top_k=50, top_p=0.95, min_p=0.01, max_tokens=12, ignore_eos=True
)
_SCORED = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=2)


def said_by(
    num_ranks: int, wait: str = "sockets", *, stages: int = 1, adapters: Sequence[Path] = ()
) -> dict[str, Any]:
    """Runs it in a process of its own, which leaves nothing behind."""
    argv = [sys.executable, "-m", __name__, str(num_ranks), str(stages), wait, *map(str, adapters)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    done.check_returncode()
    assert "leaked" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints all of it."""
    num_ranks, stages, wait, *adapters = sys.argv[1:]
    gate = None
    if ":" in wait:
        gate = _gate_at(wait, int(num_ranks), adapters.pop())
    runner = load_vllm(
        MODEL_FOLDER,
        num_blocks=200,
        dtype="float32",
        ranks=int(num_ranks),
        stages=int(stages),
        spin=wait == "memory",
        on_devices=wait == "devices",
        hosts=int(num_ranks) if wait == "hosts" or gate is not None else 1,
        gate=gate,
        lora=f"first={adapters[0]}" if adapters else "",
        max_adapters=len(adapters),
    )
    said = _by_adapters(runner, Path(adapters[1])) if adapters else _by_model(runner)
    if adapters and int(num_ranks) > 1:
        said["refusal"] = _refusal(runner, Path(adapters[1]))
    runner.close()
    print(json.dumps(said))
    end_process(0)  # as a worker ends


def _gate_at(address: str, num_hosts: int, secret_file: str) -> RankGate:
    host, _, port = address.rpartition(":")
    access = RankAccess(secret=load_secret(secret_file))
    told = asdict(Builds.of(MODEL_FOLDER))
    return RankGate(host, int(port), access, num_hosts=num_hosts, host_ranks=1, told=told)


def _by_model(runner: ModelRunner) -> dict[str, Any]:
    return {
        "greedy": generated(runner, PROMPTS, GREEDY),
        "drawn": generated(runner, PROMPTS, _DRAWN),
        "chunked": generated(runner, PROMPTS[:4], _DRAWN, max_tokens=96, num_blocks=40),
        # Longer than the rows that are looked at at once.
        "scores": _scores(runner, PROMPTS[1]),
        "pool": _means(runner),
    }


def _by_adapters(runner: ModelRunner, other: Path) -> dict[str, Any]:
    """With and without them in the same steps; then after the second one made way for the first."""
    places, (first,) = runner.adapter_places, runner.spec.adapters
    assert places is not None
    second = read_adapter("second", other)
    places.add(second)
    names = ["", first, second.id]
    asked = [(prompt, name) for prompt in PROMPTS for name in names]
    found = generated(
        runner, [each for each, _ in asked], GREEDY, adapters=[name for _, name in asked]
    )
    places.remove(second.id)
    places.remove(first)
    places.add(second)
    again = generated(runner, PROMPTS, GREEDY, adapters=[second.id] * len(PROMPTS))
    return {**{str(n): found[n :: len(names)] for n in range(len(names))}, "again": again}


def _refusal(runner: VllmRunner, folder: Path) -> str:
    """What is said of an adapter whose files only the leader has; others stay."""
    places, executor = runner.adapter_places, runner._executor
    assert places is not None
    before = generated(runner, PROMPTS[:2], GREEDY)
    copied = folder.with_name("gone")
    shutil.copytree(folder, copied)
    adapter = read_adapter("gone", copied)
    add = executor._add_adapter

    def add_and_lose(added: Adapter) -> None:
        add(added)
        shutil.rmtree(copied)

    executor._add_adapter = add_and_lose  # type: ignore[method-assign, assignment]
    try:
        places.add(adapter)
    except CheckpointError as error:
        said = str(error)
    executor._add_adapter = add  # type: ignore[method-assign]
    assert generated(runner, PROMPTS[:2], GREEDY) == before
    return said


def _scores(runner: ModelRunner, prompt: list[int]) -> list[float]:
    """Log-probabilities of a prompt's tokens, from the second on."""
    blocks = range(-(-len(prompt) // BLOCK_SIZE))
    chunk = SequenceChunk(
        7, prompt, 0, len(prompt), blocks, len(prompt), _SCORED, sample=True, score_prompt=True
    )
    (found,) = runner.execute([chunk]).prompt_logprobs.values()
    return [each.logprob for each in found]


def _means(runner: ModelRunner) -> list[float]:
    """Of each 4 KiB of the first block's float32 values, which another worker would be sent."""
    view = runner.kv.read_view(0, 1).cast("f")
    return [sum(view[at : at + 1024]) / 1024 for at in range(0, len(view), 1024)]


if __name__ == "__main__":
    main()
