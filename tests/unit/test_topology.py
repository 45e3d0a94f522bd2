"""Ranks and coordinates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.topology import Coordinates, Topology

sizes = st.integers(1, 4)
topologies = st.builds(Topology, tp=sizes, cp=sizes, ep=sizes, dp=sizes, pp=sizes, vpp=sizes)


@given(topologies)
def test_coordinates_and_rank_are_inverse_and_in_range(topology: Topology) -> None:
    seen = set()
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        assert topology.rank(at) == rank
        for name in ("tp", "cp", "ep", "dp", "pp"):
            assert 0 <= getattr(at, name) < getattr(topology, name)
        seen.add((at.tp, at.cp, at.dp, at.pp))
    assert len(seen) == topology.world_size


@given(topologies, st.sampled_from(["tp", "cp", "dp", "pp"]))
def test_groups_partition_the_world_and_differ_in_their_dimension_only(topology: Topology, dimension: str) -> None:
    groups = list(topology.groups(dimension))
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    for group in groups:
        members = [topology.coordinates(rank) for rank in group]
        assert [getattr(at, dimension) for at in members] == list(range(getattr(topology, dimension)))
        for other in {"tp", "cp", "dp", "pp"} - {dimension}:
            assert len({getattr(at, other) for at in members}) == 1


def test_megatrons_default_order() -> None:
    topology = Topology(tp=2, pp=2, dp=2)
    assert list(topology.groups("tp")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(topology.groups("dp")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(topology.groups("pp")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert topology.coordinates(5) == Coordinates(tp=1, dp=0, pp=1)
    assert topology.as_dict() == {"tp": 2, "cp": 1, "ep": 1, "dp": 2, "pp": 2, "vpp": 1}
    assert topology.coordinates(5).as_dict() == {"tp": 1, "cp": 0, "ep": 0, "dp": 0, "pp": 1}


def test_expert_parallelism_divides_data_parallelism() -> None:
    topology = Topology(dp=4, ep=2)
    assert [topology.coordinates(rank).ep for rank in range(4)] == [0, 1, 0, 1]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="pp=0"):
        Topology(pp=0)
    with pytest.raises(ValueError, match="rank 8 is not in a world of 8"):
        Topology(tp=8).coordinates(8)
    with pytest.raises(ValueError, match="no dimension 'ep'"):
        list(Topology().groups("ep"))
