"""onnxruntime-genai's generator, step by step.

On a CPU its model builder writes float32 (or weights of 4 or 8 bits), and so are its products.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.child import serve


def export(folder: Path) -> Path:
    """Converts the checkpoint, its tokens named by their numbers; returns the folder.

    Of a prompt only the last token goes through the head.
    """
    from tokenizers import Tokenizer, models  # noqa: PLC0415 - of the peer's own environment
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    out = folder.parent / f"{folder.name}-onnxruntime"
    if (out / "genai_config.json").is_file():
        return out
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = models.WordLevel({str(token): token for token in range(vocab)}, unk_token="0")
    tokenizer: Any = PreTrainedTokenizerFast
    with tempfile.TemporaryDirectory() as scratch:
        # The builder wants a tokenizer beside the weights.
        source = Path(scratch) / "checkpoint"
        tokenizer(tokenizer_object=Tokenizer(words), bos_token="1", eos_token="2").save_pretrained(
            source
        )
        for file in folder.iterdir():
            (source / file.name).symlink_to(file.resolve())
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(source), "-o", str(out), "-p", "fp32", "-e", "cpu", "-c", scratch]
        command += ["--extra_options", "prune_lm_head=true"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out


class _Engine:
    """A generator for each batch."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        import onnxruntime_genai  # type: ignore[import-not-found]  # noqa: PLC0415

        assert dtype == "float32"
        # Its threads ask again and again for what comes next while a step runs, and sleep between.
        session = {"intra_op_num_threads": threads, "session.force_spinning_stop": "1"}
        config = onnxruntime_genai.Config(str(export(folder)))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._library: Any = onnxruntime_genai
        self._model = onnxruntime_genai.Model(config)
        self._draw = random.Random(0)
        self._generator: Any = None

    def prefill(self, tokens: int) -> float:
        """See `SteppingEngine.prefill`."""
        return self.decode(1, tokens, 0)

    def decode(self, batch: int, tokens: int, steps: int) -> float:
        """See `SteppingEngine.decode`."""
        import numpy as np  # noqa: PLC0415 - of the peer's own environment

        length = tokens + 1 + steps
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=batch, min_length=length, max_length=length, do_sample=False
        )
        self._generator = self._library.Generator(self._model, params)
        rows = [[self._draw.randrange(3, 32000) for _ in range(tokens)] for _ in range(batch)]
        ids = np.array(rows, dtype=np.int32)
        started = time.perf_counter()
        self._generator.append_tokens(ids)
        return time.perf_counter() - started + self.step()

    def step(self) -> float:
        """See `SteppingEngine.step`."""
        started = time.perf_counter()
        self._generator.generate_next_token()
        return time.perf_counter() - started

    def drain(self) -> float:
        """See `SteppingEngine.drain`: nothing goes on here by itself."""
        self._generator = None
        return 0.0


if __name__ == "__main__":
    serve(_Engine, __doc__)
