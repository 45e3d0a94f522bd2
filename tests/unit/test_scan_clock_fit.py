"""The error of fitted clocks follows the noise, down to what statistics allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from clocks import error_ns, limit_ns, simulate

from trimtab.scan.clock_fit import Anchors, fit


def rms_us(clocks: int, noise_us: float, seed: int = 0) -> tuple[float, float]:
    """Root mean square error, and the median of the stated one."""
    simulated = simulate(clocks, noise_us * 1e3, seed)
    found = fit(simulated.anchors, clocks)
    error = error_ns(simulated, found.offset, found.drift)
    return float(np.sqrt((error**2).mean())) / 1e3, float(np.median(found.error)) / 1e3


@pytest.mark.parametrize("noise_us", [5.0, 100.0])
def test_the_error_is_near_the_statistical_limit_at_any_noise(noise_us: float) -> None:
    """1,024 ranks on 128 clocks. There is no floor: 20 times the noise is 20 times the error."""
    error, stated = rms_us(128, noise_us)
    limit = limit_ns(noise_us * 1e3) / 1e3
    assert limit < error < 1.5 * limit
    assert error < stated < 3 * error


def test_a_drift_that_all_clocks_share_changes_nothing() -> None:
    """Nobody can see it, and it must not shrink the offsets (which made the floor at 100 us of noise)."""
    simulated = simulate(32, 1e5)
    anchors = simulated.anchors
    faster = replace(anchors, time=anchors.time * 1.0001)
    one, other = fit(anchors, 32), fit(faster, 32)
    assert np.abs(one.offset - other.offset).max() < 2e-4 * np.abs(one.offset).max()
    spread = np.polyfit(simulated.offset - simulated.offset.mean(), one.offset, 1)[0]
    assert spread == pytest.approx(1.0, abs=0.01)


def test_a_family_that_ends_far_apart_does_not_spoil_the_others() -> None:
    """Reduce-scatters that end 3 ms apart beside all-reduces that end 5 us apart."""
    quiet, loud = simulate(32, 5e3), simulate(32, 3e6)
    rng_free = loud.anchors.time - (loud.offset + loud.drift * 0)[loud.anchors.clock]
    moved = rng_free + quiet.offset[loud.anchors.clock] + (quiet.drift - loud.drift)[loud.anchors.clock] * rng_free
    both = Anchors(
        np.r_[quiet.anchors.moment, loud.anchors.moment + quiet.anchors.count],
        np.r_[quiet.anchors.clock, loud.anchors.clock],
        np.r_[quiet.anchors.time, moved],
        np.r_[quiet.anchors.family, loud.anchors.family + 10],
        quiet.anchors.count + loud.anchors.count,
    )
    found = fit(both, 32)
    error = error_ns(quiet, found.offset, found.drift)
    assert np.sqrt((error**2).mean()) < 2 * limit_ns(5e3)


def test_clocks_that_nothing_connects_are_left_alone() -> None:
    simulated = simulate(64, 5e3)
    anchors = simulated.anchors
    apart = anchors.family < 2  # without the collectives of all clocks
    kept = np.unique(anchors.moment[apart], return_inverse=True)[1]
    part = Anchors(kept, anchors.clock[apart], anchors.time[apart], anchors.family[apart], int(kept.max()) + 1)
    found = fit(part, 64)
    assert len(np.unique(found.component)) == 2
    assert (found.component[:32] == found.component[0]).all()
