"""Constrained generation: a matcher per sequence determines the tokens that may follow.

The state is a function of the tokens generated so far, so a sequence that comes from another
worker, or was preempted, continues correctly. Compilation runs in a thread of its own and masks in
the engine's; the event loop waits for neither. Tests: tests/unit/engine/test_structure.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from kvmesh.core.errors import CheckpointError, StructureError
from kvmesh.core.types import Structure
from kvmesh.engine.grammar import NO_TEXT, grammar_text

_CACHED_STRUCTURES = 128


def _nothing() -> None:
    return


_NO_TOKEN = "NoExtensionBias"
"""Error of the matcher when no token can follow."""


class StructureCompiler:
    """Creates constraints for one model; the latest structures stay compiled.

    Args:
        tokenizer_file: the model's tokenizer.json.
        vocab_size: width of the model's logits.
        eos_token_ids: all of them may end a complete text.

    Attributes:
        on_compiled: called in the compiling thread when a structure is ready, or failed.

    Raises:
        CheckpointError: the tokenizer cannot be used.
    """

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(
                tokenizer_file.read_text(), eos_token=self._eos[0] if self._eos else None
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{tokenizer_file}: {error}") from error
        self._compiled: OrderedDict[Structure, Future[LLMatcher]] = OrderedDict()
        self.on_compiled: Callable[[], object] = _nothing
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="structure")

    def constraint(self, structure: Structure) -> GrammarConstraint:
        """Returns a constraint for one sequence; a new structure compiles in the background."""
        compiled = self._compiled.get(structure)
        if compiled is None:
            compiled = self._thread.submit(self._compile, structure)
            self._compiled[structure] = compiled
            compiled.add_done_callback(lambda _: self.on_compiled())
            if len(self._compiled) > _CACHED_STRUCTURES:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structure)
        return GrammarConstraint(compiled, self._vocab_size, self._eos)

    def _compile(self, structure: Structure) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, grammar_text(structure), log_level=0)
        except ValueError as error:
            raise StructureError(f"the structure cannot be compiled: {error}") from error
        if matcher.is_error():
            raise StructureError(f"the structure cannot be compiled: {matcher.get_error()}")
        return matcher

    def close(self) -> None:
        """Ends the thread after its current compilation. May be called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class GrammarConstraint:
    """The place of one sequence in its grammar (`engine.protocol.TokenConstraint`).

    Args:
        compiled: the matcher at the start; it is copied.
    """

    def __init__(
        self, compiled: Future[LLMatcher], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0

    @property
    def ready(self) -> bool:
        """See `TokenConstraint.ready`."""
        return self._compiled.done()

    def allowed(self, generated: Sequence[int]) -> NDArray[np.bool_]:
        """See `TokenConstraint.allowed`; waits for the compilation."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        matcher = self._matcher
        new = list(generated[self._num_consumed :])
        self._num_consumed = len(generated)
        # End tokens also end the sequence, unless the request ignores them; then a complete text
        # only repeats its end token.
        new = [token_id for token_id in new if token_id not in self._eos]
        if new and not matcher.consume_tokens(new):
            raise StructureError(f"the text does not follow its structure: {_reason(matcher)}")
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise StructureError(f"no token can continue the structure: {_reason(matcher)}")
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        mask[: len(known)] = known
        if self._eos and mask[self._eos[0]]:
            mask[self._eos] = True
        return mask


def _reason(matcher: LLMatcher) -> str:
    """Returns the first line of the matcher's error, in plain words; the rest is its state."""
    first = str(matcher.get_error()).partition("\n")[0]
    return NO_TEXT if first == _NO_TOKEN else first
