"""What an engine of some ranks says, as JSON: vLLM has one number of ranks in a process.

python -m tests.vllm.said_by NUM_RANKS sockets|memory
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import ModelRunner, SequenceChunk
from tests.engine_alone import generated
from tests.mesh_processes import MODEL_FOLDER
from tests.vllm.oracle import some_prompts
from tests.vllm_engine import BLOCK_SIZE, load_vllm

PROMPTS = some_prompts(12, 400, seed=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

_DRAWN = SamplingParams(
    temperature=0.9, seed=11, top_k=50, top_p=0.95, min_p=0.01, max_tokens=12, ignore_eos=True
)
_SCORED = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=2)


def said_by(num_ranks: int, wait: str = "sockets") -> dict[str, Any]:
    """Runs it in a process of its own."""
    argv = [sys.executable, "-m", __name__, str(num_ranks), wait]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints all of it."""
    num_ranks, wait = int(sys.argv[1]), sys.argv[2]
    runner = load_vllm(
        MODEL_FOLDER, num_blocks=200, dtype="float32", ranks=num_ranks, spin=wait == "memory"
    )
    said = {
        "greedy": generated(runner, PROMPTS, GREEDY),
        "drawn": generated(runner, PROMPTS, _DRAWN),
        "chunked": generated(runner, PROMPTS[:4], _DRAWN, max_tokens=96, num_blocks=40),
        # Longer than the rows that are looked at at once.
        "scores": _scores(runner, PROMPTS[1]),
        "pool": _means(runner),
    }
    runner.close()
    print(json.dumps(said))


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
