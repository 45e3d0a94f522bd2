"""Every order at every shape and all sorts of costs: complete, able to run, in microbatch order, within its peak."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders import ORDERS, default_chunks, make_plan, placement_of
from trimtab.pipeline.orders.clock import Board, Choice, play
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.shape import Placement, Shape
from trimtab.pipeline.timing import evaluate

PEAKS: dict[str, Callable[[Shape], float]] = {
    "gpipe": lambda shape: shape.microbatches,
    "1f1b": lambda shape: shape.stages,
    "interleaved": lambda shape: shape.stages + (shape.stages - 1) / shape.chunks,
    "bfc": lambda shape: shape.microbatches,
    "dfc": lambda shape: shape.stages + (shape.stages - 1) / shape.chunks,
    "zb-h1": lambda shape: shape.stages,
    "zb-h2": lambda shape: 2 * shape.stages - 1,
    "zb-v": lambda shape: shape.stages,
    "v-half": lambda shape: (shape.stages + 2) // 2,
    "v-min": lambda shape: (shape.stages + 4) // 3,
    "dualpipe-v": lambda shape: shape.stages + 0.5,
}
SECONDS = st.one_of(st.just(1.0), st.floats(0, 10), st.floats(1e-6, 1e-3))


def check(plan: Plan) -> None:
    """Complete and able to run, in order; the check of completeness is not Plan.validate's."""
    shape = plan.shape
    whole = {action for row in plan.actions for action in row if action.work is Work.BW}
    for row in plan.actions:
        expected = [
            Action(work, chunk, microbatch)
            for chunk in range(shape.chunks)
            for microbatch in range(shape.microbatches)
            for work in ((Work.F, Work.BW) if Action(Work.BW, chunk, microbatch) in row else (Work.F, Work.B, Work.W))
        ]
        assert sorted(row) == sorted(expected)
    assert plan.split or whole
    plan.validate()
    assert plan.in_order


@pytest.mark.parametrize("name", ORDERS)
def test_small_shapes_one_by_one(name: str) -> None:
    chunk_counts = (default_chunks(name),) if ORDERS[name].fixed_chunks else (1, 2, 3)
    for stages in range(1, 7):
        for chunks in chunk_counts:
            for microbatches in range(1, 2 * stages + 3):
                plan = make_plan(name, (stages, chunks, microbatches))
                check(plan)
                assert plan.peak() <= min(microbatches, PEAKS[name](plan.shape)) + 1e-9


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, Shape, Costs]:
    name = draw(st.sampled_from(sorted(ORDERS)))
    chunks = default_chunks(name) if ORDERS[name].fixed_chunks else draw(st.integers(1, 5))
    stages = draw(st.integers(1, 9))
    shape = Shape(stages, chunks, draw(st.integers(1, 24)), placement_of(name))

    def table(values: st.SearchStrategy[float]) -> tuple[tuple[float, ...], ...]:
        of_stage = st.tuples(*[values] * chunks)
        return draw(st.one_of(of_stage.map(lambda row: (row,) * stages), st.tuples(*[of_stage] * stages)))

    activation = draw(st.sampled_from([1.0, 2.0**30])) / chunks
    return (
        name,
        shape,
        Costs(
            table(SECONDS),
            table(SECONDS),
            table(SECONDS),
            ((activation,) * chunks,) * stages,
            draw(st.floats(0, 1)),
            draw(st.sampled_from([0.0, 0.3])),
            draw(st.sampled_from([0.0, 0.05, 2.0])),
        ),
    )


def followed(plan: Plan, costs: Costs) -> Board:
    """The plan as the clock that orders are made with runs it."""
    at = [0] * plan.shape.stages

    def choose(board: Board, stage: int, now: float) -> Choice:
        if at[stage] == len(plan.actions[stage]):
            return None
        head = plan.actions[stage][at[stage]]
        ready = now if head.work is Work.W else board.ready(stage, head)
        if not board.there(ready, now):
            return ready
        at[stage] += 1
        return head

    return play(plan.shape, costs, choose)


@given(jobs())
@settings(max_examples=100)
def test_any_shape_at_any_costs(job: tuple[str, Shape, Costs]) -> None:
    name, shape, costs = job
    plan = make_plan(name, shape, costs)
    check(plan)
    assert plan.peak(costs.kept) <= PEAKS[name](shape) + 1e-9
    timing = evaluate(plan, costs)
    assert timing.makespan >= timing.bound * (1 - 1e-9)
    board = followed(plan, costs)
    assert board.rows == plan.actions
    assert board.makespan == pytest.approx(timing.makespan)
    assert plan == make_plan(name, shape, costs), "an order is a function of its arguments"


@given(st.data(), st.sampled_from(sorted(ORDERS)), st.integers(2, 5), st.integers(1, 8))
@settings(max_examples=100)
def test_a_plan_that_was_spoilt_is_refused(data: st.DataObject, name: str, stages: int, microbatches: int) -> None:
    plan = make_plan(name, (stages, default_chunks(name), microbatches))
    stage = data.draw(st.integers(0, stages - 1))
    row = list(plan.actions[stage])
    at = data.draw(st.integers(0, len(row) - 1))
    how = data.draw(st.sampled_from(["lost", "twice", "foreign", "backward"]))
    if how == "lost":
        del row[at]
    elif how == "twice":
        row.insert(data.draw(st.integers(0, len(row))), row[at])
    elif how == "foreign":
        row[at] = row[at]._replace(microbatch=microbatches)
    else:
        row.reverse()
    spoilt = Plan(name, plan.shape, (*plan.actions[:stage], tuple(row), *plan.actions[stage + 1 :]))
    with pytest.raises(ValueError, match=f"stage {stage}"):
        spoilt.validate()


def test_stages_that_wait_for_each_other_are_named() -> None:
    # The first stage wants the gradient of microbatch 1 first, the second needs its forward for that.
    first = (Action(Work.F, 0, 0), Action(Work.BW, 0, 0), Action(Work.F, 0, 1), Action(Work.BW, 0, 1))
    second = (Action(Work.F, 0, 0), Action(Work.F, 0, 1), Action(Work.BW, 0, 0), Action(Work.BW, 0, 1))
    plan = Plan("mine", Shape(2, 1, 2), (first, second))
    with pytest.raises(ValueError, match=r"mine cannot run: .* BW0\.0 of stage 0, F0\.1 of stage 1"):
        plan.validate()


def test_a_plan_of_forwards_alone_is_complete() -> None:
    plan = make_plan("bfc", (2, 2, 3))
    forwards = Plan("bfc", plan.shape, tuple(tuple(a for a in row if a.work is Work.F) for row in plan.actions))
    forwards.validate()
    mixed = Plan("bfc", plan.shape, (forwards.actions[0], plan.actions[1]))
    with pytest.raises(ValueError, match=r"stage 0: B0\.0 is missing"):
        mixed.validate()


def test_microbatches_out_of_order_are_noticed() -> None:
    row = (Action(Work.F, 0, 1), Action(Work.F, 0, 0), Action(Work.BW, 0, 0), Action(Work.BW, 0, 1))
    plan = Plan("mine", Shape(1, 1, 2), (row,))
    plan.validate()
    assert not plan.in_order


@pytest.mark.parametrize(("weights_first", "in_order"), [(True, True), (False, False)])
def test_a_whole_backward_before_an_earlier_w_sums_gradients_out_of_order(weights_first: bool, in_order: bool) -> None:
    forwards = (Action(Work.F, 0, 0), Action(Work.F, 0, 1), Action(Work.B, 0, 0))
    rest = (Action(Work.W, 0, 0), Action(Work.BW, 0, 1))
    plan = Plan("mine", Shape(1, 1, 2), (forwards + (rest if weights_first else rest[::-1]),))
    plan.validate()
    assert plan.in_order is in_order


def test_what_is_kept_after_b_counts_until_w() -> None:
    row = tuple(Action(work, 0, microbatch) for work in (Work.F, Work.B, Work.W) for microbatch in range(2))
    plan = Plan("mine", Shape(1, 1, 2), (row,))
    assert plan.peak() == 2.0
    late = tuple(
        Action(Work(work), 0, microbatch) for work, microbatch in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1))
    )
    assert Plan("mine", Shape(1, 1, 2), (late,)).peaks(kept=0.25) == (1.25,)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forward": ((1.0,),)}, "must have a figure for each chunk of each stage"),
        ({"wgrad": ((-1.0, 1.0),) * 2}, "wgrad must be finite and at least 0"),
        ({"backward": ((float("nan"), 1.0),) * 2}, "backward must be finite"),
        ({"kept": 1.5}, "kept is a share from 0 to 1, not 1.5"),
        ({"transfer": float("inf")}, "transfer must be finite"),
    ],
)
def test_costs_that_make_no_sense_are_refused(change: dict[str, object], says: str) -> None:
    table = ((1.0, 1.0),) * 2
    arguments: dict[str, object] = {"forward": table, "backward": table, "wgrad": table, "activation": table}
    with pytest.raises(ValueError, match=says):
        Costs(**{**arguments, **change})  # pyright: ignore[reportArgumentType]


def test_uniform_costs_are_a_stages() -> None:
    costs = Costs.uniform(Shape(2, 4, 8, Placement.V), forward=2.0, backward=4.0, wgrad=1.0)
    assert [costs.seconds(1, Action(work, 3, 0)) for work in Work] == [0.5, 1.0, 0.25, 1.25]
    assert costs.load(Shape(2, 4, 8)) == (56.0, 56.0)
    assert sum(costs.activation[0]) == 1.0


def test_messages_of_a_link_follow_each_other_and_arrive_later() -> None:
    shape = Shape(2, 1, 3)
    costs = Costs.uniform(shape, transfer=1.5, latency=0.25)
    timing = evaluate(make_plan("gpipe", shape), costs)
    # Forwards end at 1, 2 and 3; their messages occupy the link until 2.5, 4 and 5.5.
    assert timing.starts[1] == (2.75, 4.25, 5.75, 6.75, 8.75, 10.75)
    assert timing.starts[0] == (0.0, 1.0, 2.0, 8.75 + 1.75, 10.75 + 1.75, 12.75 + 1.75)
    assert timing.makespan == 16.5
    assert timing.ratio == 16.5 / 9
