"""Advice on disaggregation: the cost model's figures, what fits, and what it recommends."""

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.fbd.advise.advice import advise
from trimtab.fbd.advise.candidates import Candidate, Way, balanced_share, candidates
from trimtab.fbd.advise.flow import Flow, Stage, run
from trimtab.fbd.advise.predict import bound, predict
from trimtab.fbd.advise.report import as_json, svg
from trimtab.fbd.advise.shares import refined
from trimtab.fbd.advise.training import Devices, Helpers, Training, exposure_at
from trimtab.fbd.sharing import ahead_of, own_microbatches, partners_of

pytestmark = pytest.mark.timeout(60)
ENDLESS = Devices(memory=1e18, bandwidth=1e18)


def training(kappa: float = 0.0, *, tp: int = 8, pp: int = 1, microbatches: int = 240, **more: float) -> Training:
    """F : B = 1 : 2 on every stage."""
    exposed = (kappa,) * pp if tp > 1 else (0.0,) * pp
    return Training((1.0,) * pp, (2.0,) * pp, exposed, exposed, tp, microbatches, 32, 4096, 4096, **more)


@pytest.mark.parametrize("kappa", [pytest.param(0.1, marks=pytest.mark.slow), 0.3, 0.7, 1.2])
def test_shipping_gains_what_the_cost_model_says(kappa):
    """Ordinary takes t(3 + 2 kappa), shipping t(3 + kappa); whole ratios come within 2 % of the balanced one."""
    found = advise(training(kappa), ENDLESS)
    ship = next(one for one in found.predictions if one.candidate.way is Way.SHIP)
    assert found.gain(ship) == pytest.approx((3 + 2 * kappa) / (3 + kappa), rel=0.02)
    assert found.gain(ship) <= (3 + 2 * kappa) / (3 + kappa)


def test_a_ratio_that_does_not_fit_is_balanced_by_forwards_that_trainers_run():
    """One forward device to three that train, kappa 0.7: in the ordinary way these take (1 + 0.7) + (2 + 0.7) = 4.4
    forwards for a microbatch; 3 x = (1 - x) 4.4 + x 2.7 with a share x of the forwards elsewhere."""
    job = training(0.7, tp=3, microbatches=400)
    share = balanced_share(Way.SHIP, job, 1.0, 1)
    assert share == pytest.approx(4.4 / 4.7)
    found = {
        helped: predict(job, ENDLESS, Candidate(Way.SHIP, 1, 3, 1, 1, 1, helped)).throughput for helped in (share, 1.0)
    }
    now = predict(job, ENDLESS, Candidate(Way.ORDINARY, 1, 3, 3)).throughput
    assert found[share] / now == pytest.approx(3 * 4.4 / (4 * 3 * share), rel=0.02)
    assert found[share] > 1.05 * found[1.0]
    assert any(one.helped == share for one in candidates(job) if (one.forwards, one.backwards) == (1, 1))


@pytest.mark.parametrize(("ratio", "kappa"), [((2, 3), 0.7), ((3, 4), 0.7), ((2, 3), 0.3)])
def test_the_share_is_refined_for_a_step_of_few_microbatches(ratio, kappa):
    """Trainers that begin with forwards of their own lose nothing while the first ones come from elsewhere. Devices of
    forwards and backwards are 1:3 and 3:8."""
    job = training(kappa, tp=2, microbatches=32)
    balanced = balanced_share(Way.SHIP, job, ratio[0] / ratio[1], 1)
    begins = [predict(job, ENDLESS, Candidate(Way.SHIP, 1, 2, 1, *ratio, one)) for one in {balanced, 1.0}]
    found = [refined(one, lambda other: predict(job, ENDLESS, other)) for one in begins]
    assert found[0].throughput == pytest.approx(found[-1].throughput, rel=0.01), "wherever it begins"
    assert min(one.throughput for one in found) >= 0.995 * max(one.throughput for one in begins)
    own = 32 * ratio[1] * (1 - found[0].candidate.helped)
    assert own >= ratio[1] - 1e-6


def test_recomputing_never_beats_an_ordinary_job_that_fits():
    """t(4 + 2 kappa) against t(3 + 2 kappa)."""
    for kappa in (0.0, 1.2):
        found = advise(training(kappa), ENDLESS)
        best = max(found.gain(one) for one in found.predictions if one.candidate.way is Way.SEND_INPUT)
        assert best <= (3 + 2 * kappa) / (4 + 2 * kappa) * 1.001


def test_without_exposed_communication_it_does_not_pay():
    found = advise(training(0.0), ENDLESS)
    assert not found.pays
    assert not found.best.candidate.disaggregated


def test_lower_tensor_parallelism_is_said_to_be_better_where_it_fits():
    found = advise(training(0.7), ENDLESS)
    assert not found.pays
    assert (found.best.candidate.way, found.best.candidate.tp) == (Way.ORDINARY, 1)
    assert any("needs no disaggregation" in reason for reason in found.reasons)


@pytest.mark.parametrize(("speed", "gain"), [(0.35, 1.35), (0.5, 1.5), pytest.param(1.0, 1.5, marks=pytest.mark.slow)])
def test_forward_only_helpers_pay_when_shipping(speed, gain):
    found = advise(training(tp=1, microbatches=400), ENDLESS, Helpers(1, speed, memory=1e18))
    assert found.pays
    assert found.best.candidate.on_helpers
    assert found.gain(found.best) == pytest.approx(gain, rel=0.01)


def test_forward_only_helpers_give_nothing_where_the_forward_is_run_again():
    helpers = Helpers(1, 0.35, memory=1e18)
    found = advise(training(tp=1, microbatches=400), ENDLESS, helpers)
    again = [one for one in found.predictions if one.candidate.on_helpers and one.candidate.way is Way.SEND_INPUT]
    assert again
    assert all(found.gain(one) <= 1.001 for one in again)


def test_what_helpers_cost_is_counted_where_their_price_is_known():
    helpers = Helpers(1, 0.35, memory=1e18, price=0.5)
    reasons = advise(training(tp=1, microbatches=400), ENDLESS, helpers).reasons
    (said,) = [reason for reason in reasons if reason.startswith("For the money")]
    assert re.search(r"trains (9\.\d|10\.\d)% less", said)


def test_a_slow_link_limits_shipping():
    job = training(0.7)
    candidate = Candidate(Way.SHIP, 1, 8, 1, 3, 1)
    volume = job.saved * job.hidden * job.tokens * 2 * job.layers
    slow = replace(ENDLESS, bandwidth=volume / 100.0)  # 100 s for what is computed in 8
    fast, limited = (predict(job, devices, candidate) for devices in (ENDLESS, slow))
    assert limited.step == pytest.approx(100.0 * job.microbatches / 3, rel=0.05)
    assert fast.step < limited.step / 5


def test_forwards_wait_for_the_new_weights():
    job = training(0.7, microbatches=8, parameters=1e9)
    candidate = Candidate(Way.SHIP, 1, 8, 1, 3, 1)
    late = predict(job, replace(ENDLESS, bandwidth=2e9 / 5), candidate)
    assert late.step > predict(job, ENDLESS, candidate).step + 5


def test_what_does_not_fit_says_why_and_is_not_recommended():
    job = training(0.7, pp=4, microbatches=16, parameters=8e9)
    found = advise(job, Devices(memory=22e9, bandwidth=1e12))
    assert found.best.fits
    refused = [one for one in found.predictions if not one.fits]
    assert refused
    assert all("room for" in one.reason or "fit" in one.reason for one in refused)


def test_a_job_that_does_not_fit_at_all_is_refused_in_one_line():
    with pytest.raises(ValueError, match="does not fit into devices of 5 GB") as refused:
        advise(training(parameters=1e12), Devices(memory=5e9))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"forward": ()}, "forward"),
        ({"forward": (math.nan,)}, "finite"),
        ({"backward": (0.0,)}, "take time"),
        ({"backward": (1.0, 1.0)}, "each of the 1 stages"),
        ({"tp": 0}, "tp is at least 1"),
        ({"layers": 0}, "layers is at least 1"),
        ({"saved": 0.0}, "saved is above 0"),
        ({"tp": 1}, "degree of 1"),
    ],
)
def test_nonsense_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(training(0.3), **changes)


def test_exposure_follows_the_volume_of_a_ring():
    assert exposure_at(7.0, 8, 8) == pytest.approx(7.0)
    assert exposure_at(7.0, 8, 2) == pytest.approx(4.0)
    assert exposure_at(7.0, 8, 1) == 0.0


@pytest.mark.parametrize("kappa", [0.0, 0.7, 1.2])
@pytest.mark.parametrize("degree", [2, 3])
def test_a_tensor_parallel_group_is_as_many_devices_with_a_microbatch_each(kappa, degree):
    """What the benchmark on GPUs takes for it: the throughput is the same but for how a step begins."""
    job = training(kappa, tp=degree, microbatches=400)
    group = predict(job, ENDLESS, Candidate(Way.SHIP, 1, degree, 1, forwards=1))
    alone = Stage(1.0 + kappa, 1.0, 0.0, 2.0 + kappa, 2.0 + kappa, cap=4)
    each = run(Flow((alone,), 400 * degree, trainers=degree, helpers=1, helped=1.0))
    assert 400 / each.makespan / (degree + 1) == pytest.approx(group.throughput, rel=0.01)


def test_ordinary_training_is_one_forward_one_backward():
    """(m + p - 1)(F + B), with at most p - i microbatches held on stage i."""
    stage = Stage(1.0, 0.0, 0.0, 2.0, 2.0, cap=1)
    ran = run(Flow(tuple(replace(stage, cap=4 - i) for i in range(4)), 12))
    assert ran.makespan == pytest.approx((12 + 3) * 3)
    assert ran.peak == [4, 3, 2, 1]
    assert ran.busy_trainers == pytest.approx(12 / 15)


@settings(max_examples=60, deadline=None)
@given(
    caps=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    ahead=st.integers(1, 3),
    seconds=st.tuples(*[st.floats(0.1, 4.0)] * 4),
    microbatches=st.integers(1, 12),
    trainers=st.integers(1, 3),
    helpers=st.integers(1, 3),
    helped=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
def test_no_flow_deadlocks_holds_too_much_or_is_faster_than_its_busiest_device(
    caps, ahead, seconds, microbatches, trainers, helpers, helped
):
    own, forward, ship, backward = seconds
    stages = tuple(Stage(own, forward, ship, backward, backward, cap, ahead) for cap in caps)
    flow = Flow(stages, microbatches, trainers, helpers, helped)
    ran = run(flow)
    by_helpers = len(flow.by_helpers())
    work = by_helpers * backward + (microbatches - by_helpers) * (own + backward)
    assert ran.makespan >= work / trainers - 1e-9
    assert ran.makespan >= max(forward, ship) * by_helpers / helpers - 1e-9
    partners = partners_of(flow.by_helpers(), trainers)
    assert all(peak <= cap + partners * ahead for peak, cap in zip(ran.peak, caps, strict=True))
    assert ran.busy_trainers * ran.makespan * len(caps) * trainers == pytest.approx(work * len(caps))


def test_two_microbatches_under_way_wait_for_each_other():
    """As it was measured once: with two, a forward begins when the backward before last is done, so that forward, link
    and backward follow each other; with three the slowest of them is what a microbatch takes."""
    stage = Stage(15.5, 33.0, 11.0, 31.0, 31.0, cap=1, ahead=2)
    took = {ahead: run(Flow((replace(stage, ahead=ahead),), 400, 1, 1, 1.0)).makespan / 400 for ahead in (1, 2, 3)}
    assert took == pytest.approx({1: 33 + 11 + 31, 2: (33 + 11 + 31) / 2, 3: 33.0}, rel=0.01)


@pytest.mark.parametrize("layout", [(1, 1), (1, 3), (3, 8), (2, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("stages", [1, 3])
def test_as_many_are_under_way_as_keep_trainers_busy(layout, stages):
    """Both sides with as much to do, and links that take as long as backwards may at most."""
    forwards, backwards = layout
    each = Stage(1.0, forwards / backwards, 0.0, 1.0, 1.0, cap=1)
    each = replace(each, ship=min(1.0, forwards / backwards))
    flow = Flow((each,) * stages, 48 * backwards, backwards, forwards, 1.0)
    partners = partners_of(flow.by_helpers(), backwards)

    def took(more: int) -> float:
        aheads = [ahead_of(stages - 1 - one, forwards, backwards, partners) + more for one in range(stages)]
        found = tuple(replace(each, ahead=ahead) for ahead in aheads)
        return run(replace(flow, stages=found)).makespan

    assert took(0) == pytest.approx(took(20), rel=0.02)


def test_trainers_begin_with_a_forward_of_their_own():
    """Where any are theirs: the helper's first forward takes three times as long as theirs."""
    stage = Stage(1.0, 3.0, 0.1, 2.0, 2.0, cap=1)
    ran = run(Flow((stage,), 40, 1, 1, 0.5))
    assert ran.busy_trainers == pytest.approx(1.0)


@settings(max_examples=200, deadline=None)
@given(microbatches=st.integers(1, 40), backwards=st.integers(1, 8), helped=st.floats(0.0, 1.0, allow_subnormal=False))
def test_own_microbatches_are_the_first_ones_and_then_spread(microbatches, backwards, helped):
    own = sorted(own_microbatches(microbatches, backwards, helped))
    assert len(own) == microbatches - int(microbatches * helped + 1e-9)
    assert all(0 <= one < microbatches for one in own)
    first = min(len(own), backwards)
    assert own[:first] == list(range(first))
    more = own[first:]
    if more:
        whole = (microbatches - first) / (len(more) + 1)
        gaps = [b - a for a, b in zip([first, *more], [*more, microbatches], strict=True)]
        assert all(abs(gap - whole) <= 1 for gap in gaps)


@settings(max_examples=25, deadline=None)
@given(kappa=st.floats(0.0, 1.5), pp=st.sampled_from([1, 2, 4]), microbatches=st.integers(1, 24))
def test_no_prediction_beats_its_bound(kappa, pp, microbatches):
    job = training(kappa, tp=4, pp=pp, microbatches=microbatches)
    for one in list(candidates(job))[::37]:
        assert predict(job, ENDLESS, one).throughput <= bound(job, ENDLESS, one) * (1 + 1e-9)


def test_the_same_in_json_and_as_a_picture():
    found = advise(training(0.7, pp=2, microbatches=8), Devices(memory=141e9, bandwidth=2e11))
    said = json.loads(json.dumps(as_json(found)))
    assert said["schema"] == "trimtab.fbd-advice/1"
    assert said["recommended"] == found.best.candidate.name
    assert [one["gain"] for one in said["candidates"] if one["fits"]] == sorted(
        (one["gain"] for one in said["candidates"] if one["fits"]), reverse=True
    )
    picture = svg(found)
    assert picture.count("<rect") >= 4
    assert found.best.candidate.name in picture
