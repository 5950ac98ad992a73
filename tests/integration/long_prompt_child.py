"""Computes the last steps of a long prompt and prints how much memory they took at most, in MiB.

python long_prompt_child.py FOLDER TOKENS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvmesh.engine.measure import Stage
from kvmesh.engine.runner import TorchRunner

CHUNK = 512
BLOCK_SIZE = 16


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    folder, num_tokens = Path(sys.argv[1]), int(sys.argv[2])
    num_blocks = 4 * num_tokens // BLOCK_SIZE
    runner = TorchRunner.load(
        folder, served_name="long", num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    stage = Stage(runner, [num_tokens])
    stage.run([0], [CHUNK])
    before = peak_mib()
    for start in range(num_tokens - 2 * CHUNK, num_tokens, CHUNK):
        stage.run([start], [start + CHUNK])
    print(json.dumps({"grown_mib": peak_mib() - before}))


if __name__ == "__main__":
    main()
