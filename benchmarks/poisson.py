"""When the requests of an open load arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson_times(
    draw: random.Random, rate: float, begin_s: float, end_s: float
) -> Iterator[float]:
    """Times of a Poisson process of `rate` per second, in seconds, from `begin_s` to `end_s`.

    Each is drawn when it is asked for, so callers may draw what arrives in between.
    """
    at_s = begin_s + draw.expovariate(rate)
    while at_s < end_s:
        yield at_s
        at_s += draw.expovariate(rate)
