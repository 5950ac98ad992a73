from __future__ import annotations

import pytest

from benchmarks.live_link import far_link, missing

NO_LINK = missing()


@pytest.mark.skipif(bool(NO_LINK), reason=f"a link of the kernel's: {NO_LINK}")
def test_nothing_is_left_of_a_link_when_the_next_one_is_made() -> None:
    for _ in range(3):
        with far_link(1e6) as link:
            link.set_rate(2e6)
