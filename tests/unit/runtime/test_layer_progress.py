"""Which layers of a prompt leave, and behind which moment."""

from __future__ import annotations

from kvmesh.runtime.layer_progress import LayerProgress, moment_of, past_of
from tests.device_twin import TwinDriver


def test_all_that_is_written_leaves_at_once() -> None:
    layers = LayerProgress()
    assert layers.next(lambda _: True) is None
    for number in (1, 2, 3):
        layers.computed(number, None)
    assert layers.next(lambda _: True) == (3, None)
    layers.num_sent = 3
    assert layers.next(lambda _: True) is None


def test_layers_that_a_device_was_only_given_wait_for_no_later_ones() -> None:
    driver, layers = TwinDriver(), LayerProgress()
    driver.past = 0
    for number in (1, 2, 3):
        driver.mark()
        layers.computed(number, driver.moment())
    assert layers.next(driver.is_past) == (1, 1)
    layers.num_sent = 1
    driver.past = 3
    assert layers.next(driver.is_past) == (3, 3)


def test_layers_told_twice_or_refused_do_not_leave() -> None:
    layers = LayerProgress()
    layers.computed(2, None)
    layers.computed(1, None)
    layers.computed(2, None)
    assert layers.next(lambda _: True) == (2, None)
    layers.is_refused = True
    assert layers.next(lambda _: True) is None


def test_memory_of_the_host_has_no_moments() -> None:
    assert moment_of(b"")() is None
    assert past_of(b"")(None)
