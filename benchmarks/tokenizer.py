"""What it takes to turn prompts into tokens: `tokenizers` against what the gateway uses.

Both encode the same prompts in turn, in one process, and their ids are compared. A round begins
with tokenizers that have seen nothing. Tests: tests/unit/benchmarks/test_chat_prompts.py.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fastokens
import tokenizers

from benchmarks.chat_prompts import KINDS, chats, growing
from benchmarks.result import RESULTS, ROOT, Row, Target, document, save
from services.gateway.text.encoder_check import first_difference
from services.gateway.text.text_encoder import TextEncoder
from services.gateway.text.tokenizer import TOKENIZER_FILE, load_tokenizer

ALONE, OURS = "tokenizers", "gateway"
NUM_PROMPTS = 360
NUM_CHATS, NUM_TURNS = 36, 8
LONG_CHARS = 1_000_000
START_CPU_MS = 50.0

_NOTES = (
    (
        "Prompts: rendered chats of 800 to 8,000 characters, a ninth each of English, English with "
        "typographic quotes, Python code, German, Russian, Chinese, Japanese, Arabic and emoji; "
        "texts of the last six are put together from a few sentences, so their words repeat sooner "
        "than users' do. Prompts that a thread encodes are among them."
    ),
    (
        "`first sight`: every prompt once, by tokenizers that have encoded nothing before. "
        "`growing chats`: 36 chats of 8 turns, sent whole with every turn, all mixed."
    ),
    (
        "Times of a prompt are wall clock, of 1,000 prompts processor time of the process. Ratios "
        "are of medians in one run."
    ),
    (
        "`1 MB`: one text of a million characters, encoded in a thread; `loop held` is the longest "
        "gap between two turns of an event loop that does nothing else, the machine's own included."
    ),
    (
        "Fastokens keeps what it said of words. It could also keep whole messages, which is left "
        "off: how soon an answer comes would tell one tenant what another one sent."
    ),
)


@dataclass
class Way:
    """What one of the two took, over all rounds, in microseconds a prompt."""

    times: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def add(self, phase: str, times: Sequence[float], cpu_s: float) -> None:
        """Notes a round."""
        self.times.setdefault(phase, []).extend(times)
        self.cpu_s[phase] = self.cpu_s.get(phase, 0.0) + cpu_s

    def median(self, phase: str) -> float:
        """Of a prompt."""
        return statistics.median(self.times[phase])


async def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "pydoc-6m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "tokenizer.json")
    args = parser.parse_args()
    file = args.model / TOKENIZER_FILE
    render = load_tokenizer(args.model).chat.render
    first = [(kind, render(messages)) for kind, messages in chats(NUM_PROMPTS, args.seed)]
    grown = [("", render(messages)) for messages in growing(NUM_CHATS, NUM_TURNS, args.seed)]
    ways = {ALONE: Way(), OURS: Way()}
    equal = 0
    for number in range(args.rounds):
        turn = list(ways) if number % 2 == 0 else list(reversed(ways))
        for phase, prompts in (("first sight", first), ("growing chats", grown)):
            found = {name: await _measure(ways[name], name, file, phase, prompts) for name in turn}
            equal += sum(map(tuple.__eq__, found[ALONE], found[OURS]))
    rows = [
        _row(phase, name, ways[name])
        for phase in ("first sight", *(f"first sight, {kind}" for kind in KINDS), "growing chats")
        for name in ways
    ]
    load_ms, check_ms = _start(file)
    held = [await _held_ms(name, file, "".join(text for _, text in first)) for name in ways]
    rows += [
        {"phase": "1 MB", "way": name, "ms": round(took, 1), "loop held ms": round(gap, 1)}
        for name, (took, gap) in zip(ways, held, strict=True)
    ]
    rows += [
        {"phase": "load fastokens", "way": OURS, "ms": round(load_ms, 1)},
        {"phase": "compare both at start", "way": OURS, "ms": round(check_ms, 1)},
    ]
    targets = [
        Target("prompts with equal ids", equal / (args.rounds * len(first + grown)), 1.0),
        Target("first sight over tokenizers", _ratio(ways, "first sight"), 5.0),
        Target("growing chats over tokenizers", _ratio(ways, "growing chats"), 10.0),
        Target("comparison at start, ms", check_ms, START_CPU_MS, at_most=True),
    ]
    versions = {each.__name__: _version(each.__name__) for each in (tokenizers, fastokens)}
    save(document(rows, targets, args.seed, _NOTES, versions), args.out)


async def _measure(
    way: Way, name: str, file: Path, phase: str, prompts: Sequence[tuple[str, str]]
) -> list[tuple[int, ...]]:
    """Encodes all of them with new tokenizers, and notes what it took."""
    encoder = await _encoder(name, file)
    began, found = time.process_time(), []
    times: list[float] = []
    for _, text in prompts:
        at = time.perf_counter()
        found.append(await encoder.encode(text, add_special_tokens=False))
        times.append((time.perf_counter() - at) * 1e6)
    way.add(phase, times, time.process_time() - began)
    for wanted in KINDS:
        if chosen := [
            took for took, (kind, _) in zip(times, prompts, strict=True) if kind == wanted
        ]:
            way.add(f"{phase}, {wanted}", chosen, 0.0)
    return found


async def _encoder(name: str, file: Path) -> TextEncoder:
    exact = tokenizers.Tokenizer.from_file(str(file))
    exact.no_truncation()
    exact.no_padding()
    encoder = TextEncoder(exact)
    if name == OURS:
        await encoder.speed_up(file)
    return encoder


def _row(phase: str, name: str, way: Way) -> Row:
    times = sorted(way.times[phase])
    cpu_s = way.cpu_s[phase]
    return {
        "phase": phase,
        "way": name,
        "p50 us": round(statistics.median(times), 1),
        "p99 us": round(times[int(0.99 * (len(times) - 1))], 1),
        "CPU s of 1,000": round(1000 * cpu_s / len(times), 4) if cpu_s else None,
    }


def _ratio(ways: dict[str, Way], phase: str) -> float:
    return ways[ALONE].median(phase) / ways[OURS].median(phase)


def _start(file: Path) -> tuple[float, float]:
    """Processor time of loading fastokens' tokenizer and of comparing it, in ms."""
    exact = tokenizers.Tokenizer.from_file(str(file))
    began = time.process_time()
    fast = fastokens.Tokenizer.from_file(str(file))
    loaded = time.process_time()
    first_difference(exact, fast)
    return (loaded - began) * 1e3, (time.process_time() - loaded) * 1e3


async def _held_ms(name: str, file: Path, text: str) -> tuple[float, float]:
    """How long a very long text took, and how long the event loop stood still at most."""
    encoder = await _encoder(name, file)
    text = (text * (1 + LONG_CHARS // len(text)))[:LONG_CHARS]
    began = last = time.perf_counter()
    task = asyncio.ensure_future(encoder.encode(text, add_special_tokens=False))
    longest = 0.0
    while not task.done():
        await asyncio.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await task
    return (time.perf_counter() - began) * 1e3, longest * 1e3


def _version(package: str) -> str:
    return importlib.metadata.version(package)


if __name__ == "__main__":
    asyncio.run(main())
