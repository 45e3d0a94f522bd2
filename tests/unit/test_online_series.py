"""The sequential tests on simulated times of many jobs at once: few false alarms, short delays, at any noise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trimtab.scan.online.peers import median, others_median
from trimtab.scan.online.sequential import Pool
from trimtab.scan.online.series import Budget, Series

RANKS = 8

maybe = st.floats(-10, 10) | st.just(float("nan"))
tables = arrays.arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=maybe)


def jobs(runs, ranks=RANKS):
    return Series([np.arange(ranks)], False, [Budget()] * runs)


def logs(random, runs, *, noise=0.02, outliers=0.0, heavy=False, ranks=RANKS):
    """One step: noise, what all have in common, and disturbances."""
    x = noise * (random.standard_t(3, (runs, ranks)) if heavy else random.standard_normal((runs, ranks)))
    x += 0.1 * random.standard_normal((runs, 1))
    hit = random.random((runs, ranks)) < outliers
    return x + np.where(hit, np.log1p(random.exponential(0.5, (runs, ranks))), 0.0)


@pytest.mark.parametrize(
    "noise", [{}, {"outliers": 0.02}, {"outliers": 0.05}, {"heavy": True}, {"noise": 0.06}, {"noise": 0.0001}]
)
def test_healthy_jobs_raise_next_to_nothing(noise):
    random = np.random.default_rng(1)
    series, alarmed = jobs(60), np.zeros(60, bool)
    for _ in range(400):
        alarmed |= series.step(logs(random, 60, **noise)).any(axis=1)
    assert alarmed.sum() <= 1


@pytest.mark.parametrize(("outliers", "within"), [(0.0, 3), (0.02, 4), (0.05, 5)])
def test_a_slow_rank_is_found_soon(outliers, within):
    random = np.random.default_rng(2)
    series, delay = jobs(60), np.full(60, np.inf)
    for step in range(90):
        x = logs(random, 60, outliers=outliers)
        x[:, 2] += np.log(1.15) * (step >= 80)
        new = series.step(x)
        delay = np.where(new[:, 2], step - 79, delay)
    assert np.median(delay) <= within
    assert np.mean(delay <= within) > 0.6
    assert np.isfinite(delay).mean() > 0.9


def test_a_drift_of_one_rank_is_found_and_one_of_all_is_not():
    random = np.random.default_rng(3)
    one, everyone = jobs(20), jobs(20)
    found = np.zeros((20, RANKS), bool)
    for step in range(500):
        x = logs(random, 20, noise=0.01)
        assert not everyone.step(x + 0.0004 * step).any()
        x[:, 5] += 0.0004 * step
        found |= one.step(x)
    assert found[:, 5].all()
    assert not np.delete(found, 5, axis=1).any()


def test_a_rank_that_never_speaks_disturbs_nobody():
    random = np.random.default_rng(4)
    series = jobs(10)
    for step in range(120):
        x = logs(random, 10, noise=0.01)
        x[:, 0] = np.nan
        if step % 3 == 0:
            x[:, 1] = np.nan
        x[:, 4] += 0.2 * (step >= 100)
        new = series.step(x)
        assert not new[:, [0, 1, 2, 3, 5, 6, 7]].any()
    assert series.alarmed[:, 4].all()
    assert series.mean[:, 4] == pytest.approx(0.2, abs=0.03)


@given(tables)
def test_the_median_of_the_others(values):
    found = others_median(values)
    for row, told in zip(values, found, strict=True):
        for place, known in enumerate(np.isfinite(row)):
            others = np.delete(row, place)
            others = others[np.isfinite(others)]
            if known:
                assert told[place] == pytest.approx(np.median(others) if len(others) else 0.0)


@given(tables)
def test_the_median_of_what_is_known(values):
    for row, (told,) in zip(values, median(values, 1), strict=True):
        known = row[np.isfinite(row)]
        assert told == pytest.approx(np.median(known)) if len(known) else np.isnan(told)


def test_the_pool_is_a_density():
    pool = Pool(2, 4)
    z = np.linspace(-10, 60, 70_001)
    bins = pool.bins(np.stack([z, z]))
    everything, tail = np.exp(pool.log_density(bins))
    total = everything.sum(axis=1) * (z[1] - z[0])
    assert total == pytest.approx([1.0, 1.0], abs=0.02)
    assert (tail <= everything).all()


def test_what_was_often_seen_says_little():
    calm, busy = Pool(1, 4), Pool(1, 4)
    places = calm.bins(np.full((1, 4), 8.0))
    everywhere = np.ones((1, 4), bool)
    for _ in range(100):
        calm.learn(calm.bins(np.zeros((1, 4))), everywhere)
        busy.learn(busy.bins(np.zeros((1, 4))), everywhere)
        busy.learn(places, everywhere)
    assert busy.log_density(places)[0].max() > calm.log_density(places)[0].max() + 3
