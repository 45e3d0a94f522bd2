"""Virtual ranks: numbering, groups, who has which microbatch, and what cannot be laid out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.fbd.ranks import Layout, Placement, Role, VirtualRank

pytestmark = pytest.mark.timeout(60)


@st.composite
def layouts(draw):
    forward_tp = draw(st.sampled_from([1, 2]))
    return Layout(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        forward_tp,
        forward_tp * draw(st.sampled_from([1, 2, 4])),
        draw(st.integers(1, 2)),
    )


@given(layouts())
def test_numbers_and_ranks_are_two_names_of_one_thing(layout):
    for role in Role:
        ranks = list(layout.ranks(role))
        assert len(set(ranks)) == layout.count(role)
        assert [layout.number(one) for one in ranks] == list(range(layout.count(role)))


@given(layouts())
def test_data_groups_divide_all_backward_ranks(layout):
    assert sorted(one for group in layout.data_groups() for one in group) == list(range(layout.count(Role.BACKWARD)))
    for group in layout.data_groups():
        members = [layout.rank(Role.BACKWARD, one) for one in group]
        assert len({(one.stage, one.tp) for one in members}) == 1


@given(layouts(), st.integers(1, 6))
def test_every_microbatch_is_once_on_either_side_and_partners_are_those_who_share_some(layout, each):
    of_cell = each * layout.backwards
    for cell in range(layout.cells):
        for role, count in ((Role.FORWARD, layout.forwards), (Role.BACKWARD, layout.backwards)):
            instances = range(cell * count, (cell + 1) * count)
            seen = [j for one in instances for j in layout.microbatches(role, one, of_cell)]
            assert sorted(seen) == list(range(of_cell))
            assert all(
                layout.instance_of(role, cell, j) == one
                for one in instances
                for j in layout.microbatches(role, one, of_cell)
            )
    period = layout.forwards * layout.backwards
    for forward in layout.ranks(Role.FORWARD):
        mine = set(layout.microbatches(Role.FORWARD, forward.instance, period))
        cell = forward.instance // layout.forwards
        for backward in layout.ranks(Role.BACKWARD):
            theirs = set(layout.microbatches(Role.BACKWARD, backward.instance, period))
            near = backward.stage == forward.stage and backward.instance // layout.backwards == cell
            wide = layout.backward_tp // layout.forward_tp
            shares = near and bool(mine & theirs) and backward.tp // wide == forward.tp
            assert (backward in layout.partners(forward)) == shares
            assert (forward in layout.partners(backward)) == shares


@given(layouts())
def test_every_forward_rank_gets_all_of_its_weights(layout):
    wide = layout.backward_tp // layout.forward_tp
    got = {one: [] for one in layout.ranks(Role.FORWARD)}
    for giver, takers in layout.weight_groups():
        assert giver.role is Role.BACKWARD
        for one in takers:
            assert one.stage == giver.stage
            got[one].append(giver.tp)
    for one, parts in got.items():
        assert sorted(parts) == list(range(one.tp * wide, (one.tp + 1) * wide))


@given(layouts(), st.integers(1, 4))
def test_every_virtual_rank_has_one_home(layout, together):
    if layout.count(Role.FORWARD) % together:
        with pytest.raises(ValueError, match="cannot be divided into processes"):
            Placement(layout, together)
        return
    placement = Placement(layout, together)
    homes = [one for process in range(placement.world) for one in placement.hosted(process)]
    assert len(homes) == len(set(homes)) == layout.count(Role.FORWARD) + layout.count(Role.BACKWARD)
    assert all(one in placement.hosted(placement.process(one)) for one in homes)
    placement.fits(placement.world)
    with pytest.raises(ValueError, match=f"the job has {placement.world + 1}"):
        placement.fits(placement.world + 1)


def test_backward_ranks_alone_are_an_ordinary_job():
    layout = Layout(stages=2, forwards=1, backwards=2, forward_tp=1, backward_tp=2)
    assert layout.data_groups() == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.rank(Role.BACKWARD, 6) == VirtualRank(Role.BACKWARD, 1, 1, 0)
    assert Placement(layout).world == 10
    assert Placement(layout, together=2).hosted(8) == (
        VirtualRank(Role.FORWARD, 0, 0, 0),
        VirtualRank(Role.FORWARD, 1, 0, 0),
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Layout(0), "stages is at least 1"),
        (lambda: Layout(1, forwards=0), "forwards is at least 1"),
        (lambda: Layout(1, forward_tp=2, backward_tp=3), "has to divide"),
        (lambda: Layout(1).rank(Role.FORWARD, 1), "1 is none of them"),
        (lambda: Layout(1, backwards=2).microbatches(Role.FORWARD, 0, 3), "the same number"),
        (lambda: Placement(Layout(1)).hosted(2), "2 is none of them"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, said):
    with pytest.raises(ValueError, match=said) as refused:
        make()
    assert "\n" not in str(refused.value)
