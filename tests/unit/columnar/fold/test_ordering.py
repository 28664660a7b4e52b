"""Order of a key group's rows: copies are found among many devices and across years."""

import numpy as np
import pytest

from fleetpulse.columnar.codec.arrow import signals_to_batch
from fleetpulse.columnar.fold.ordering import in_order
from tests.support.histories.histories import signal

pytestmark = pytest.mark.unit


def test_copies_are_found_among_many_devices_and_across_years() -> None:
    year_s = 31_536_000
    rows = [
        signal(0, "a", seq=1),
        signal(10 * year_s, "a", seq=2),
        signal(5 * year_s, "b", seq=1),
        signal(5 * year_s, "b", seq=1),
    ]
    order, copies = in_order(signals_to_batch(rows), np.array([0, 0, 2**21, 2**21]))
    assert order.tolist() == [0, 1, 2]
    assert copies.tolist() == [3]
