"""A timeline of kernels is drawn as what a screen can show of it, and nothing that can be seen is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.scan.plots import Category, Segment
from trimtab.scan.report.segments import SCREEN, coarse


def test_a_thousand_kernels_in_a_row_are_one_stretch() -> None:
    kernels = [Segment(0, at * 1e-5, at * 1e-5 + 8e-6, Category.KERNEL, f"k{at}") for at in range(1000)]
    gaps = [Segment(0, at * 1e-5 + 8e-6, (at + 1) * 1e-5, Category.GAP) for at in range(1000)]
    long = Segment(0, 0.01, 0.1, Category.WAIT, "all_reduce")
    got = coarse([*kernels, *gaps, long])
    assert [(s.category, round(s.start_s, 6), round(s.end_s, 6)) for s in got] == [
        (Category.KERNEL, 0.0, 0.009998),
        (Category.WAIT, 0.01, 0.1),
    ]
    assert got[0].label.startswith("1000 stretches")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.floats(0, 1),
            st.floats(0, 0.2),
            st.sampled_from([Category.KERNEL, Category.GAP, Category.WAIT]),
        ),
        max_size=60,
    )
)
def test_what_can_be_seen_stays(rows: list[tuple[int, float, float, Category]]) -> None:
    segments = [Segment(rank, start, start + lasts, category) for rank, start, lasts, category in rows]
    got = coarse(segments)
    assert len(got) <= len(segments)
    span = max((s.end_s for s in segments), default=0) - min((s.start_s for s in segments), default=0)
    for one in segments:
        if one.end_s - one.start_s >= span / SCREEN:
            assert any(
                other.rank == one.rank
                and other.category is one.category
                and other.start_s <= one.start_s
                and other.end_s >= one.end_s
                for other in got
            )
