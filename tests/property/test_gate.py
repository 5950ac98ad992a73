"""No choice of a call is heard of before all were taken; then each is, whole and in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.types import FinishReason, Placement, TokenLogprobs
from kvmesh.core.types import WorkerId as W
from services.gateway.request.gate import Gate
from services.gateway.request.mesh import Placed

Word = tuple[object, ...]


@dataclass
class Kept:
    """A sink that keeps what it is told."""

    told: list[Word] = field(default_factory=list)

    def placed(self, where: Placed) -> None:
        self.told.append((where,))

    def first(
        self, cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs], embedding: bytes
    ) -> None:
        self.told.append((cached_tokens, prompt_logprobs, embedding))

    def stopped(self, stop: str) -> None:
        self.told.append((stop,))

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        self.told.append((text, token_ids, logprobs, finish))


@st.composite
def _interleaved(draw: st.DrawFn) -> tuple[list[list[Word]], list[int]]:
    """What workers say of each choice, and whose turn it is."""
    scripts: list[list[Word]] = []
    for _ in range(draw(st.integers(2, 5))):
        script: list[Word] = [(Placed(Placement.AGGREGATED, W("p"), W("p")),), (3, (), b"v")]
        script += [(str(at), (at,), (), None) for at in range(draw(st.integers(0, 4)))]
        if draw(st.booleans()):  # its worker is lost, another one takes it
            script.append((Placed(Placement.AGGREGATED, W("q"), W("q")),))
        script.append(("end", (9,), (), FinishReason.LENGTH))
        scripts.append(script)
    turns = [index for index, script in enumerate(scripts) for _ in script]
    order = draw(st.permutations(turns))
    return scripts, order[: draw(st.integers(0, len(order)))]  # any call may end at any time


@given(_interleaved())
def test_nothing_goes_out_before_all_were_taken(case: tuple[list[list[Word]], list[int]]) -> None:
    scripts, order = case
    sinks = [Kept() for _ in scripts]
    opened: list[bool] = []
    gate = Gate(sinks, lambda: opened.append(any(sink.told for sink in sinks)))
    said = [0] * len(scripts)
    for index in order:
        held, word = gate.held[index], scripts[index][said[index]]
        said[index] += 1
        match word:
            case (Placed() as where,):
                held.placed(where)
            case (int(cached), tuple(scores), bytes(embedding)):
                held.first(cached, scores, embedding)
            case (str(text), tuple(token_ids), tuple(scores), finish):
                assert finish is None or isinstance(finish, FinishReason)
                held.push(text, token_ids, scores, finish)
        taken = all(said)  # the first that is said of each is that it was taken
        assert gate.is_open == taken
        for sink, script, count in zip(sinks, scripts, said, strict=True):
            assert sink.told == (script[:count] if taken else [])
    assert opened == ([False] if all(said) else [])
