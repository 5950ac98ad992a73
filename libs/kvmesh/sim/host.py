"""A host whose workers share its cores with each other and with the front (gateway, scheduler and
client): work takes longer beside other work.

Tests: tests/unit/sim/test_host.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from kvmesh.sim.profile import Sharing, Work

FRONT_WINDOW_S = 0.25
"""Seconds over which the front's recent computing is averaged to give its present use of cores."""

FRONT_PROCESSES = 5
"""Number of the front's processes: gateway, scheduler, kvmanager, Redis and the client."""


STEP_WEIGHT = 2.0
"""Cores that a worker may get in decode steps, over those of one that computes a prompt.

Its thread sleeps between two steps, for milliseconds at most, and the kernel's scheduler runs such
threads before those that never sleep. Measured on Linux 6.18 with two cores, beside two workers
with prompts: the thread that computes steps ran for 0.66 of the time, theirs for 0.45.
"""


class Sharer(Protocol):
    """The step loop of a worker on the host."""

    def others_changed(self) -> None:
        """Called when another worker of the host starts or stops computing, or changes its work."""
        ...


class Host:
    """Tracks the workers of one host that compute now.

    Args:
        now: returns the virtual time in seconds.
    """

    def __init__(self, sharing: Sharing, now: Callable[[], float]) -> None:
        self.sharing = sharing
        self._now = now
        self._front_cores = 0.0
        self._front_at = 0.0
        self._sharers: list[Sharer] = []
        self._busy: dict[Sharer, Work] = {}

    def add(self, sharer: Sharer) -> None:
        """Adds a worker to the host."""
        self._sharers.append(sharer)

    def note(self, sharer: Sharer, work: Work | None) -> None:
        """Records what a worker computes from now on, None for nothing; may be repeated."""
        if work is self._busy.get(sharer):
            return
        if work is None:
            del self._busy[sharer]
        else:
            self._busy[sharer] = work
        for each in self._sharers:
            if each is not sharer:
                each.others_changed()

    def idle_share(self, sharer: Sharer) -> float:
        """Returns the share of a worker's time in which its engine waits, on a host of its own."""
        work = self._busy.get(sharer)
        return 1.0 if work is None else 1.0 - self.sharing.cores_of(work)

    # --- the front ---------------------------------------------------------------------------

    def note_request(self, num_tokens: int) -> None:
        """Counts the front's work for an arriving request with a prompt of so many tokens."""
        front = self.sharing.front
        if front is not None:
            self._spend(front.request_s + num_tokens * front.prompt_token_s)

    def note_tokens(self, count: int) -> None:
        """Counts the front's work for tokens sent to clients."""
        front = self.sharing.front
        self._spend(0.0 if front is None else count * front.token_s)

    def note_refusals(self, count: int) -> None:
        """Counts the front's work for refused offers."""
        front = self.sharing.front
        self._spend(0.0 if front is None else count * front.ask_s)

    def _spend(self, seconds: float) -> None:
        if seconds:
            self._front_cores = self._asked_cores + seconds / FRONT_WINDOW_S
            self._front_at = self._now()

    @property
    def _asked_cores(self) -> float:
        """Number of cores that the front uses now for what it was asked."""
        return self._front_cores * math.exp((self._front_at - self._now()) / FRONT_WINDOW_S)

    @property
    def front_cores(self) -> float:
        """Number of cores that the front uses now."""
        front = self.sharing.front
        return self._asked_cores + (0.0 if front is None else front.idle_cores)

    # --- how long work takes -----------------------------------------------------------------

    @property
    def message_stretch(self) -> float:
        """Factor on the time of a control message over an idle host.

        Its receiver needs a core while all computing workers keep theirs.
        """
        front = self.sharing.front
        if front is None:
            return 1.0
        computing = sum(map(self.sharing.cores_of, self._busy.values()))
        return max((computing + 1 + self.front_cores) / front.cores, 1.0)

    def prefill_stretch(self, sharer: Sharer) -> float:
        """Returns the factor on the time of a prompt's chunk over a host of its own."""
        return self._stretch(self.sharing.prefill, sharer, Work.PROMPT)

    def decode_stretch(self, sharer: Sharer) -> float:
        """Returns the factor on the time of a decode step over a host of its own.

        In a step with chunks of prompts it waits for cores as they do.
        """
        return self._stretch(self.sharing.decode, sharer, self._busy.get(sharer, Work.STEPS))

    def _stretch(self, by_each: float, sharer: Sharer, work: Work) -> float:
        others = [each for other, each in self._busy.items() if other is not sharer]
        front = self.sharing.front
        if front is None:
            return 1 + (by_each - 1) * len(others)
        # Of the others, no more than there are further cores compute at the same time.
        alone = 1 + (by_each - 1) * min(len(others), max(front.cores - 1, 1))
        num_steps = others.count(Work.STEPS) + (work is Work.STEPS)
        crowded = crowding(num_steps, len(others) + 1 - num_steps, self.front_cores, self.sharing)
        return alone * crowded[work]


def crowding(
    num_steps: int, num_prompts: int, front_cores: float, sharing: Sharing
) -> dict[Work, float]:
    """Returns the factors on the time of work if workers and front want more cores than exist.

    A worker can use `Sharing.cores_of` its work. A fair CPU scheduler first serves threads that
    want less than an equal share: the front and the workers' event loops, which mostly wait. The
    workers divide the rest by `STEP_WEIGHT`, and together keep at least their share of all cores.

    Args:
        num_steps: number of workers in decode steps.
        num_prompts: number of workers that compute prompts.
        sharing: with a front.
    """
    front, loop = sharing.front, sharing.loop
    assert front is not None, "nothing tells the number of cores"
    cores, count = front.cores, num_steps + num_prompts
    if not count:
        return {Work.STEPS: 1.0, Work.PROMPT: 1.0}
    small = front_cores + (0.0 if loop is None else num_steps * loop.step_cores)
    left = max(cores - small, cores * count / (count + FRONT_PROCESSES))
    wanted = {work: sharing.cores_of(work) for work in Work}
    share = left / (STEP_WEIGHT * num_steps + num_prompts)
    given = {Work.STEPS: STEP_WEIGHT * share, Work.PROMPT: share}
    if num_steps and num_prompts:  # each gets what the other does not use
        if given[Work.STEPS] > wanted[Work.STEPS]:
            given[Work.PROMPT] = (left - num_steps * wanted[Work.STEPS]) / num_prompts
        elif given[Work.PROMPT] > wanted[Work.PROMPT]:
            given[Work.STEPS] = (left - num_prompts * wanted[Work.PROMPT]) / num_steps
    return {work: max(wanted[work] / given[work], 1.0) for work in Work}
