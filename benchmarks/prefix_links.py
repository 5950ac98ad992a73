"""Where fetching a prefix stops to pay: first tokens over slower and slower links, and what routes
decide about each of them.

    python -m benchmarks.prefix_links

Two worker processes with a random Llama, one engine thread each, TCP between them through a relay
that paces it. Links are named by the time in which a token's KV travels, as a part of the time in
which the token is computed: at 1 both take as long.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fetch_workers import Address, Asker, asking, worker_process
from benchmarks.paced_link import FRONT, Pace, free_port, paced_link
from benchmarks.random_llama import SHAPES, Shape, write_checkpoint
from benchmarks.result import RESULTS, Row, Target, document, markdown, save, spread
from kvmesh.core.fetch_reason import FetchReason
from kvmesh.policy.prefix_source import WORTH, FetchPace, saved_tokens

BLOCK, TAIL, PREFIX = 16, 16, 512
SHORT = 256
"""Prefix of the fetch from which the pace of a link is known."""

SHARES = (0.05, 0.3, 0.6, 1.2, 2.0)
"""Of links: the time in which a token travels over that in which it is computed."""

PATIENT = {"fetch.timeout-s": 300.0}
"""Of the reader: slow links are to be measured to their end."""

DTYPES = {"bfloat16": 2, "float32": 4}

ABOUT = f"""\
prefix of {PREFIX} tokens, {TAIL} new ones behind it; times are from the request on a worker's
 stream to the first token
- share: the time in which a token's KV travels over the link, of that in which it is computed
- decision: by `saved_tokens`, told the time of a computed token and the pace that a fetch of
 {SHORT} tokens over the same link showed; fetches that save less than a fifth are left alone
- right: the way that it chose was the sooner one""".replace("\n ", " ").split("\n- ")


@dataclass(frozen=True, slots=True)
class Ends:
    """Both workers and the link between them.

    Attributes:
        address: of the holder.
        token_bytes: KV of a token.
    """

    holder: Asker
    reader: Asker
    address: Address
    pace: Pace
    token_bytes: int
    draw: random.Random

    def prompt(self, prefix: int) -> list[int]:
        """One that nobody has seen."""
        return [self.draw.randrange(3, 30000) for _ in range(prefix + TAIL)]

    async def fetch(self, prefix: int) -> tuple[float, float]:
        """Milliseconds to compute a prompt, and then to fetch its prefix over the link."""
        prompt = self.prompt(prefix)
        computed = await self.holder.first_token(prompt)
        fetched = await self.reader.first_token(prompt, self.address.source(prefix // BLOCK))
        assert fetched.cached_tokens == prefix, "all was fetched"
        assert fetched.token_id == computed.token_id, "the same token"
        return computed.milliseconds, fetched.milliseconds


async def measure(ends: Ends, repeats: int) -> list[Row]:
    """A row for each link."""
    await ends.fetch(SHORT)  # connections and libraries
    # What is not the link's: lease, and the tokens behind the prefix.
    base_ms = statistics.median([(await ends.fetch(SHORT))[1] for _ in range(repeats)])
    rows: list[Row] = []
    for share in SHARES:
        # Each time: what the machine does besides changes it.
        token_s = (await ends.holder.first_token(ends.prompt(PREFIX))).milliseconds / PREFIX / 1e3
        ends.pace.bytes_s = ends.token_bytes / (share * token_s)
        shown_ms = (await ends.fetch(SHORT))[1] - base_ms
        pace = FetchPace(token_s, inside_token_s=max(shown_ms, 0.01) / SHORT / 1e3)
        saved = saved_tokens(PREFIX, 0.0, pace.overhead_tokens, pace.inside_share)
        reason = FetchReason.FETCH if saved else FetchReason.SLOW
        times = [await ends.fetch(PREFIX) for _ in range(repeats)]
        rows.append(_row(share, ends.pace.bytes_s, reason, times))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    return rows


def _row(
    share: float, bytes_s: float, reason: FetchReason, times: Sequence[tuple[float, float]]
) -> Row:
    computed, fetched = zip(*times, strict=True)
    saved_ms = statistics.median(computed) - statistics.median(fetched)
    return {
        "share": share,
        "link_mb_s": round(bytes_s / 1e6, 2),
        "computed_ms": spread(computed, 1),
        "fetched_ms": spread(fetched, 1),
        "saved_ms": round(saved_ms, 1),
        "decision": reason.value,
        "right": (reason is FetchReason.FETCH) == (saved_ms > 0),
    }


def targets(rows: Sequence[Row]) -> list[Target]:
    """The decision flips where it should, and is right on both sides."""
    wrong = sum(not row["right"] for row in rows)
    fetched = [row["share"] for row in rows if row["decision"] == FetchReason.FETCH.value]
    left = [row["share"] for row in rows if row["decision"] != FetchReason.FETCH.value]
    return [
        Target("links for which the decision was the later way", wrong, 0, at_most=True),
        Target(
            "slowest link that is fetched over", max(fetched, default=None), WORTH, at_most=True
        ),
        Target("fastest link that is not", min(left, default=None), WORTH),
    ]


async def run(shape: Shape, dtype: str, repeats: int, seed: int) -> list[Row]:
    """Starts both workers and measures."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = write_checkpoint(shape, Path(folder), seed)
        blocks = 16 * (PREFIX // BLOCK)
        port = free_port()
        behind = {"server.advertise-host": FRONT, "worker.data-port": port}
        address = stack.enter_context(worker_process("holder", model, blocks, "tcp", dtype, behind))
        reader = stack.enter_context(worker_process("reader", model, blocks, "tcp", dtype, PATIENT))
        pace = Pace()
        async with AsyncExitStack() as links:
            await links.enter_async_context(paced_link(port, pace))
            ends = Ends(
                await links.enter_async_context(asking(address)),
                await links.enter_async_context(asking(reader)),
                address,
                pace,
                shape.kv_values * DTYPES[dtype],
                random.Random(seed),
            )
            return await measure(ends, repeats)


def main() -> None:
    """Measures and writes bench/results/prefix_links.*."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--shape", default="110M", choices=tuple(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    chosen = parser.parse_args()
    rows = asyncio.run(run(SHAPES[chosen.shape], chosen.dtype, chosen.repeats, chosen.seed))
    about = [f"random Llama of {chosen.shape}, {chosen.dtype}, one engine thread per worker"]
    result = document(rows, targets(rows), chosen.seed, [*about, *ABOUT])
    if not chosen.dry:
        save(result, RESULTS / "prefix_links.json")
    sys.stdout.write(markdown(result))


if __name__ == "__main__":
    main()
