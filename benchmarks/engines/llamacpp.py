"""llama.cpp by its low-level API: one llama_decode for each step of a batch.

Weights and the operands of their products are bf16 or fp32; products are added up in fp32. Keys
and values are in the cache's usual fp16 beside either, which is its fastest too. Its Python:

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python==0.3.36 gguf
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.child import serve
from benchmarks.engines.llamacpp_weights import export

# Rounds in which a thread of OpenMP waits before it sleeps: long enough within a step, and soon
# over behind it, when another engine has its turn. The default is three times as many.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")
# Cells of a sequence are a multiple of this many.
_CELLS = 256


class _Engine:
    """A model, and a context that has room for what is computed at present."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]  # noqa: PLC0415 - of the peer's own
        import numpy as np  # noqa: PLC0415

        self._lib: Any = llama_cpp
        self._lib.llama_backend_init()
        parameters = self._lib.llama_model_default_params()
        path = str(export(folder, dtype)).encode()
        self._model = self._lib.llama_model_load_from_file(path, parameters)
        vocabulary = self._lib.llama_model_get_vocab(self._model)
        self._vocab_size = self._lib.llama_vocab_n_tokens(vocabulary)
        self._threads = threads
        self._draw = np.random.default_rng(0)
        self._context: Any = None
        self._room = (0, 0)
        self._batch: Any = None
        self._next: Any = None
        self._num_chosen = 0
        self._position = 0

    def prefill(self, tokens: int) -> float:
        """See `SteppingEngine.prefill`."""
        self._empty(1, tokens)
        return self._prompt(0, self._draw.integers(3, 32000, tokens).tolist())

    def decode(self, batch: int, tokens: int, steps: int) -> float:
        """See `SteppingEngine.decode`."""
        self._empty(batch, tokens + steps)
        first = []
        for sequence in range(batch):
            self._prompt(sequence, self._draw.integers(3, 32000, tokens).tolist())
            first += self._next
        self._next, self._position = first, tokens
        return self.step()

    def step(self) -> float:
        """See `SteppingEngine.step`."""
        started = time.perf_counter()
        sequences = range(self._room[0])
        self._fill(self._next, [self._position] * len(sequences), sequences, sequences)
        self._compute()
        self._position += 1
        return time.perf_counter() - started

    def drain(self) -> float:
        """See `SteppingEngine.drain`."""
        return 0.0

    def _empty(self, sequences: int, tokens: int) -> None:
        """A context of so many sequences in which nothing is computed."""
        if self._room == (sequences, tokens):
            self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
            return
        if self._context is not None:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._context)
        parameters = self._lib.llama_context_default_params()
        parameters.n_ctx = sequences * -(-tokens // _CELLS) * _CELLS
        parameters.n_batch = max(tokens, sequences)
        parameters.n_seq_max = parameters.n_outputs_max = sequences
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.flash_attn_type = self._lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.kv_unified = False  # or each sequence would look at all sequences' cells
        self._context = self._lib.llama_init_from_model(self._model, parameters)
        self._batch = self._lib.llama_batch_init(max(tokens, sequences), 0, 1)
        self._room = sequences, tokens

    def _prompt(self, sequence: int, ids: list[int]) -> float:
        """Seconds from a sequence's prompt to its first token."""
        self._fill(ids, range(len(ids)), [sequence] * len(ids), [len(ids) - 1])
        started = time.perf_counter()
        self._compute()
        return time.perf_counter() - started

    def _fill(
        self,
        ids: list[int],
        positions: Iterable[int],
        sequences: Iterable[int],
        chosen: Sequence[int],
    ) -> None:
        """The batch: ids with their positions and sequences, and after which of them to choose."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for row, (token, position, sequence) in enumerate(
            zip(ids, positions, sequences, strict=True)
        ):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = 0
        for row in chosen:
            batch.logits[row] = 1
        self._num_chosen = len(chosen)

    def _compute(self) -> None:
        """The batch's next tokens, the likeliest."""
        import numpy as np  # noqa: PLC0415

        if self._lib.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode did not compute the batch")
        logits = self._lib.llama_get_logits(self._context)
        shape = (self._num_chosen, self._vocab_size)
        self._next = np.ctypeslib.as_array(logits, shape).argmax(1).tolist()


if __name__ == "__main__":
    serve(_Engine, __doc__)
