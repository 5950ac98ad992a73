"""Many requests through two engines that are short of blocks, and each through one engine alone.

Requests are computed here or handed over, fetch prefixes, move in any state and are cancelled, some
while a step is computed; copies to host memory are late. Blocks that nobody holds are overwritten,
so what is read too late shows in log-probabilities. For as long as you like:

    python -m tests.integration.crowd --seconds 600 qwen3-next minimax
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvmesh.core.types import FinishReason, Refusal, RefusalReason, SequenceSpec, TokenLogprobs
from kvmesh.engine.core import EngineCore
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.sequence import Emission, Sequence, SequenceState
from kvmesh.kv.hashing import root_hash
from tests.integration.crowd_engines import FAMILIES, Engine, copy_block, load
from tests.integration.crowd_requests import Request, some_requests

TOLERANCE = 2e-4
"""Of log-probabilities in fp32: products of other shapes round otherwise."""

_MOST_TURNS = 20_000


@dataclass(eq=False, slots=True)
class Stream:
    """A request and what was said so far.

    Attributes:
        places: engines with a sequence of it: none, one, or the sender and the receiver of its KV.
        is_held: its one sequence waits to be let run.
        num_sent: blocks that the receiver has.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    places: list[tuple[Engine, Sequence]] = field(default_factory=list)
    is_held: bool = False
    num_sent: int = 0

    @property
    def spec(self) -> SequenceSpec:
        """What an engine is asked from now on."""
        prompt, sampling = self.request.prompt, self.request.sampling
        if self.tokens:  # the prompt's scores came with the first one
            sampling = replace(sampling, num_prompt_logprobs=-1)
        return SequenceSpec((*prompt, *self.tokens), len(prompt), sampling, root_hash("crowd"))

    @property
    def is_preempted(self) -> bool:
        """Whether one of its sequences lost its blocks."""
        return any(each.state is SequenceState.PREEMPTED for _, each in self.places)

    def take(self, emission: Emission) -> None:
        """Takes the next token."""
        assert self.finish is None, "a token follows the last one"
        assert not emission.error, emission.error
        assert emission.position == len(self.request.prompt) + len(self.tokens)
        self.tokens.append(emission.token_id)
        self.logprobs.append(emission.logprobs)
        self.prompt_logprobs += emission.prompt_logprobs
        self.finish = emission.finish_reason

    def leave(self) -> None:
        """Gives its sequences up."""
        for engine, sequence in self.places:
            engine.core.release(sequence)
        self.places.clear()
        self.is_held = False
        self.num_sent = 0


class Crowd:
    """Streams on two engines.

    Attributes:
        ended: streams that are at their end or were cancelled.
        seen: how often what happened.
    """

    def __init__(
        self,
        runners: tuple[TorchRunner, TorchRunner],
        requests: list[Request],
        draw: random.Random,
    ) -> None:
        self._draw = draw
        self._engines = [Engine(runner, draw) for runner in runners]
        self._waiting = [Stream(request) for request in requests]
        self._here: list[Stream] = []
        self.ended: list[Stream] = []
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        """Until all are at their end and nothing is left."""
        turns = 0
        while self._waiting or self._here:
            turns += 1
            assert turns < _MOST_TURNS, "they take room from each other for ever"
            self._act()
            stepped = [self._step(engine) for engine in self._engines]
            if not any(stepped):
                self._unblock()
            self._collect()
        for engine in self._engines:
            engine.copier.catch_up()
            engine.check_idle()
            now = engine.core.statistics()
            self.seen["preempted"] += now.preemptions_total
            self.seen["swapped in"] += now.swap.swapped_in_total
            self.seen["tokens found cached"] += now.cached_tokens_total

    def _step(self, engine: Engine) -> bool:
        chunks = engine.core.plan_step()
        if chunks:
            if self._draw.random() < 0.1:
                self._act()
            engine.core.finish_step(chunks, engine.runner.execute(chunks))
        engine.check()
        return bool(chunks)

    def _collect(self) -> None:
        for stream in [each for each in self._here if each.finish is not None]:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        stream.leave()
        self._here.remove(stream)
        self.ended.append(stream)

    def _act(self) -> None:
        draw = self._draw
        self._collect()
        if self._waiting and draw.random() < 0.7:
            self._admit(self._waiting.pop(0))
        for stream in self._here:
            if stream.is_held and draw.random() < 0.3:
                self._let_run(stream)
            if len(stream.places) == 2 and draw.random() < 0.4:
                self._send(stream)
        if self._here and draw.random() < 0.03:
            self._move(self._someone())
        if self._here and draw.random() < 0.004:
            self.seen["cancelled"] += 1
            self._end(self._someone())
        for engine in self._engines:
            if engine.copier.jobs and draw.random() < 0.3:
                engine.copier.run_one()

    def _someone(self) -> Stream:
        weights = [4 if stream.is_preempted else 1 for stream in self._here]
        return self._draw.choices(self._here, weights)[0]

    def _admit(self, stream: Stream) -> None:
        spec = stream.spec
        engine, other = self._draw.sample(self._engines, 2)
        sequence = engine.core.admit_decode(spec)
        if isinstance(sequence, Refusal):
            assert sequence.reason is RefusalReason.NO_BLOCKS, sequence
            self._waiting.append(stream)
            return
        stream.places.append((engine, sequence))
        if self._draw.random() < 0.5:
            stream.is_held = True
            sequence.on_emission = stream.take
            self._here.append(stream)
            return
        source = other.core.admit_prefill(spec)
        if isinstance(source, Refusal):
            stream.leave()
            self._waiting.append(stream)
            return
        source.on_emission = stream.take
        stream.places.insert(0, (other, source))
        self._here.append(stream)

    def _let_run(self, stream: Stream) -> None:
        ((engine, sequence),) = stream.places
        if self._draw.random() < 0.8:
            (other,) = (each for each in self._engines if each is not engine)
            self._fetch(engine, sequence, other)
        engine.core.run(sequence)
        stream.is_held = False

    def _fetch(self, engine: Engine, sequence: Sequence, holder: Engine) -> None:
        """Brings what another engine has of a prefix, or a part of that."""
        fill = engine.core.begin_fill(sequence)
        length, held = holder.core.fills.rooms.leased(fill.hashes, fill.num_held, len(fill.hashes))
        room = fill.open(length) if length > fill.num_held else None
        if room is not None:
            count = self._draw.choice((len(room), self._draw.randrange(len(room) + 1)))
            for here, there in list(zip(room, held, strict=True))[:count]:
                copy_block(holder, there, engine, here)
            fill.close(count)
            self.seen["fetched"] += 1
        fill.end()
        holder.core.pool.release(held)

    def _send(self, stream: Stream) -> None:
        """Hands over what is complete, and the stream with its first token."""
        (sender, source), (receiver, target) = stream.places
        first = target.num_cached // receiver.core.block_size
        blocks = sender.core.arriving_blocks(source, first)
        places = receiver.core.arriving_blocks(target, first)
        ready = sum(each.tokens <= source.num_computed for each in blocks)
        fresh = slice(stream.num_sent, ready)
        for here, there in zip(blocks[fresh], places[fresh], strict=True):
            copy_block(sender, here.block, receiver, there.block)
        stream.num_sent = max(stream.num_sent, ready)
        if source.state is not SequenceState.HELD:
            return  # there is no first token yet
        assert stream.num_sent == len(places)
        target.on_emission = stream.take
        receiver.core.start_decode(target, source.tokens[-1])
        sender.core.release(source)
        stream.places.pop(0)
        stream.num_sent = 0
        self.seen["handed over"] += 1

    def _move(self, stream: Stream) -> None:
        self.seen["moved while preempted" if stream.is_preempted else "moved"] += 1
        stream.leave()
        self._here.remove(stream)
        self._waiting.insert(0, stream)

    def _unblock(self) -> None:
        """Nothing can be computed: what others wait for is done, or given up as leases are."""
        self._collect()
        late = [engine for engine in self._engines if engine.copier.jobs]
        held = [stream for stream in self._here if stream.is_held]
        sending = [stream for stream in self._here if len(stream.places) == 2]
        done = [each for each in sending if each.places[0][1].state is SequenceState.HELD]
        for engine in late:
            engine.copier.catch_up()
        for stream in held:
            self._let_run(stream)
        for stream in done:
            self._send(stream)
        if late or held or done or not self._here:
            return
        assert sending, "there is room for those that wait"
        self.seen["given up"] += 1
        self._move(self._draw.choice(sending))


def alone(runner: TorchRunner, request: Request) -> Stream:
    """What an engine with nothing else to do says, the prompt in one chunk."""
    runner.use_static_steps(0)
    core = EngineCore(runner.spec, runner.kv.num_blocks)
    stream = Stream(request)
    sequence = core.admit_decode(stream.spec)
    assert isinstance(sequence, Sequence), sequence
    sequence.on_emission = stream.take
    core.run(sequence)
    while core.has_work:
        chunks = core.plan_step()
        core.finish_step(chunks, runner.execute(chunks))
    return stream


def furthest(found: Stream, wanted: Stream) -> float:
    """The largest difference of a log-probability, of equal tokens.

    Args:
        found: one that was cancelled has only begun.
    """
    count = len(found.tokens)
    assert found.tokens == wanted.tokens[:count]
    assert found.finish in (wanted.finish, None)
    scores = zip(found.logprobs, wanted.logprobs[:count], strict=True)
    pairs = [(one, other) for one, other in scores if one is not None and other is not None]
    if found.tokens:
        pairs += zip(found.prompt_logprobs, wanted.prompt_logprobs, strict=True)
    worst = 0.0
    for one, other in pairs:
        worst = max(worst, abs(one.logprob - other.logprob))
        for mine, theirs in zip(one.top_logprobs, other.top_logprobs, strict=True):
            worst = max(worst, abs(mine - theirs))
    return worst


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a crowd came to.

    Attributes:
        worst: largest difference of a log-probability.
    """

    worst: float
    seen: Counter[str]


def run_crowd(runners: tuple[TorchRunner, TorchRunner], seed: int, num_requests: int) -> Outcome:
    """Runs requests alone, then together, and asserts that tokens are equal and nothing is left."""
    draw = random.Random(f"crowd {seed}")
    requests = some_requests(draw, num_requests)
    wanted = {request: alone(runners[0], request) for request in requests}
    crowd = Crowd(runners, requests, draw)
    crowd.run()
    assert len(crowd.ended) == num_requests
    worst = max(furthest(stream, wanted[stream.request]) for stream in crowd.ended)
    return Outcome(worst, crowd.seen)


def main() -> None:
    """Runs crowds of each family in turn, and stops at the first that goes wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loaded = {name: load(name, Path(folder) / name) for name in options.families}
        deadline, seed = time.monotonic() + options.seconds, options.seed
        while time.monotonic() < deadline:
            for name, runners in loaded.items():
                print(name, seed, flush=True)
                outcome = run_crowd(runners, seed, options.requests)
                print(f"  {outcome.worst:.1e} {dict(outcome.seen)}", flush=True)
                assert outcome.worst < TOLERANCE
            seed += 1


if __name__ == "__main__":
    main()
