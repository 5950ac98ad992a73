"""All series that services export, as a scrape names them."""

from __future__ import annotations

from functools import cache

from tests.unit.docs.test_metrics import SECTIONS

_HISTOGRAM = ("_bucket", "_sum", "_count")


@cache
def known_metrics() -> frozenset[str]:
    """Names of samples, those of histograms with their endings."""
    names: set[str] = set()
    for read in SECTIONS.values():
        for name, kind in read().items():
            names |= {f"{name}{end}" for end in _HISTOGRAM} if kind == "histogram" else {name}
    return frozenset(names)
