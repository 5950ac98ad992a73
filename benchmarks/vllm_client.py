"""`vllm bench serve` as a child of `benchmarks.vllm_serve`: arguments in, a result out, by lines.

vLLM takes ten seconds to import, so one process runs all loads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from typing import Any

TAKEN = (
    "completed",
    "failed",
    "duration",
    "output_throughput",
    "request_goodput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "errors",
)
"""Of vLLM's result, what `benchmarks.vllm_serve` uses."""


def main() -> None:
    """Runs a load for each line of standard input."""
    from vllm.benchmarks import serve  # noqa: PLC0415 - only this process has to have it

    module: Any = serve
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        parser = module.FlexibleArgumentParser()
        module.add_cli_args(parser)
        # It prints tables.
        with contextlib.redirect_stdout(sys.stderr):
            found = module.main(parser.parse_args(json.loads(line)["argv"]))
        taken = {name: found.get(name) for name in TAKEN}
        # Seconds between two events of a stream; a stream of one event has none.
        taken["longest_pause"] = max(itertools.chain.from_iterable(found["itls"]), default=0.0)
        sys.stdout.write(json.dumps(taken) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
