"""ctranslate2's generator; a step is what passes between two tokens of its loop.

On a CPU it computes in float32 (or with weights of 8 bits). It has no call for one step: a whole
generation runs in its thread and calls back for each token, and that call waits until the next
step is asked for. The last token of a prompt goes through the loop, after all those before it.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.engines.child import serve

# How often idle threads look for work before they sleep: enough between two products of a step.
# By default it is some milliseconds, in which another engine would have to share its cores.
_LOOKS = "10000"
# Each step makes a new cache of a token more out of the one before. Memory that went back to the
# system in between would be mapped and cleared page by page, for longer than the step computes.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEPT_MEMORY = {_M_TRIM_THRESHOLD: 2**31 - 1, _M_MMAP_MAX: 0, _M_ARENA_MAX: 1}


def keep_memory() -> None:
    """Tells the C library to keep what is freed, as allocators made for servers do."""
    adjust = ctypes.CDLL(None).mallopt
    for option, value in _KEPT_MEMORY.items():
        assert adjust(option, value) == 1, "the C library knows the option"


def export(folder: Path) -> Path:
    """Converts the checkpoint, its tokens named by their numbers; returns the folder."""
    from ctranslate2.converters import (  # type: ignore[import-not-found]  # noqa: PLC0415
        TransformersConverter,
    )

    out = folder.parent / f"{folder.name}-ctranslate2"
    if not (out / "model.bin").is_file():
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        tokenizer = SimpleNamespace(
            get_vocab=lambda: {str(token): token for token in range(vocab)},
            unk_token="0",
            bos_token="1",
            eos_token="2",
        )
        converter = TransformersConverter(str(folder))
        converter.load_tokenizer = lambda *_, **__: tokenizer
        converter.convert(str(out), quantization="float32")
    return out


class Turns:
    """Holds a generation after each of its steps.

    Apart from the engine: the generator's thread lets go of it later than callers get the last
    token, and must not be the one that ends the generator.
    """

    def __init__(self, batch: int) -> None:
        """Begins the first step of so many rows."""
        self.seconds: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.go_on: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._batch = batch
        self._rows = 0
        self._ended = False
        self._begun = time.perf_counter()

    def on_token(self, _: object) -> bool:
        """Called for each row of a step, in the generator's thread; true ends that row."""
        if self._ended:
            return True
        self._rows += 1
        if self._rows % self._batch == 0:
            self.seconds.put(time.perf_counter() - self._begun)
            self._ended = not self.go_on.get()
            self._begun = time.perf_counter()
        return self._ended


class _Engine:
    """One generation at a time."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        # Read when its OpenMP is loaded.
        os.environ.setdefault("GOMP_SPINCOUNT", _LOOKS)
        import ctranslate2  # type: ignore[import-not-found]  # noqa: PLC0415

        self._generator: Any = ctranslate2.Generator(
            str(export(folder)), compute_type=dtype, inter_threads=1, intra_threads=threads
        )
        self._draw = random.Random(0)
        self._results: list[Any] = []

    def prefill(self, tokens: int) -> float:
        """See `SteppingEngine.prefill`."""
        seconds = self.decode(1, tokens, 0)
        self.drain()
        return seconds

    def decode(self, batch: int, tokens: int, steps: int) -> float:
        """See `SteppingEngine.decode`."""
        self.drain()
        prompts = [
            [str(self._draw.randrange(3, 32000)) for _ in range(tokens)] for _ in range(batch)
        ]
        self._turns = Turns(batch)
        self._results = self._generator.generate_batch(
            prompts,
            asynchronous=True,
            include_prompt_in_result=False,
            min_length=1 + steps,
            max_length=1 + steps,
            callback=self._turns.on_token,
        )
        return self._turns.seconds.get()

    def step(self) -> float:
        """See `SteppingEngine.step`."""
        self._turns.go_on.put(True)
        return self._turns.seconds.get()

    def drain(self) -> float:
        """See `SteppingEngine.drain`."""
        if not self._results:
            return 0.0
        started = time.perf_counter()
        self._turns.go_on.put(False)
        for result in self._results:
            result.result()
        self._results = []
        return time.perf_counter() - started


if __name__ == "__main__":
    keep_memory()
    serve(_Engine, __doc__)
