"""Frames of all ranks put together are what one rank with the whole tensor would have measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scope.assembling import tile_values
from trimtab.scope.frame import Frame, decode, encode
from trimtab.scope.shards import Gathering, Merged, Replicas, merge_frames
from trimtab.scope.vector import derive, exponents_of, vector_of

X = np.random.default_rng(0).standard_normal((8, 2, 6)).astype(np.float32)  # s, b, h
LABELS = ["s", "b", "h"]


def frame(what, arrays, shard=(), rank=0, labels=LABELS, **more) -> Frame:
    meta = {"labels": labels} | more.pop("meta", {})
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    return Frame("layers.3.mlp.output", what, "s-1", 120, 0, rank, shard, arrays=arrays, meta=meta, **more)


def parts(axis: str, count: int, x=X):
    """(rank, shard, part) of a tensor cut along an axis, as ranks hold it."""
    if axis == "tp":
        pieces = np.split(x, count, axis=-1)
    elif axis == "sp":
        pieces = np.split(x, count)
    else:
        chunks = np.split(x, 2 * count)
        pieces = [np.concatenate((chunks[i], chunks[2 * count - 1 - i])) for i in range(count)]
    return [(rank, ((axis, rank, count),), piece) for rank, piece in enumerate(pieces)]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_statistics_of_the_parts_are_those_of_the_whole(data):
    axes = data.draw(st.permutations(("tp", "sp", "dp", "fsdp")))[:2]
    cut = data.draw(st.lists(st.integers(0, X.size), min_size=3, max_size=3).map(sorted))
    pieces = np.split(X.reshape(-1), cut)
    shards = list(itertools.product(*[[(axis, index, 2) for index in range(2)] for axis in axes]))
    shifts = data.draw(st.lists(st.sampled_from((0.0, 0.5, -3.0)), min_size=4, max_size=4))
    frames = [
        frame(
            "histogram",
            {"vector": vector_of(piece, shift), "shift": [shift], "exponents": exponents_of(piece)},
            shard,
            rank,
        )
        for rank, (piece, shard, shift) in enumerate(zip(pieces, shards, shifts, strict=True))
    ]
    merged = merge_frames(data.draw(st.permutations(frames)))
    assert merged.complete
    assert np.array_equal(merged.arrays["exponents"], exponents_of(X))
    found = derive(merged.arrays["vector"], float(merged.arrays["shift"][0])).as_dict()
    whole = derive(vector_of(X)).as_dict()
    for name, value in whole.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("axis", ["tp", "sp", "cp"])
def test_tiles_lie_side_by_side(axis):
    def tiled(piece):
        matrix = piece.reshape(-1, piece.shape[-1])
        low, high = float(matrix.min()), float(matrix.max())
        levels = np.rint((matrix - low) / (high - low) * 253).astype(np.uint8)
        return {"tiles": levels, "scale": np.array([low, high], np.float32), "extent": [*matrix.shape, 1, 1]}

    frames = [frame("tiles", tiled(piece), shard, rank) for rank, shard, piece in parts(axis, 2)]
    values = merge_frames(frames[::-1]).arrays["values"]
    assert values.shape == (16, 6)
    assert merge_frames(frames).arrays["extent"].tolist() == [16, 6, 1, 1]
    assert np.abs(values - X.reshape(16, 6)).max() <= (X.max() - X.min()) / 253
    alone = merge_frames([frame("tiles", tiled(X))])
    assert alone.arrays["tiles"].dtype == np.uint8  # as it came, and its values
    assert np.isinf(tile_values(np.array([[254, 255]], np.uint8), np.array([0.0, 1.0]))).tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("extent", "whole"), [((6, 4, 2, 2), [12, 4, 2, 2]), ((5, 4, 2, 2), None), ((6, 3, 2, 2), [12, 3, 2, 2])]
)
def test_an_extent_of_the_whole_is_told_where_its_tiles_are_of_one_size(extent, whole):
    arrays = {"tiles": np.zeros((3, 2), np.uint8), "scale": np.zeros(2, np.float32), "extent": np.array(extent)}
    frames = [frame("tiles", arrays, (("sp", rank, 2),), rank) for rank in range(2)]
    found = merge_frames(frames).arrays.get("extent")
    assert (None if found is None else found.tolist()) == whole


def test_tiles_over_chosen_dimensions_lie_side_by_side_along_them():
    frames = [
        frame(
            "tiles",
            {"tiles": np.full((2, 3), rank * 253, np.uint8), "scale": [0.0, 1.0], "extent": [2, 3, 1, 1]},
            (("tp", rank, 2),),
            rank,
            meta={"dims": ["h", "s"]},
        )
        for rank in range(2)
    ]
    assert merge_frames(frames).arrays["values"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2


def test_heads_are_side_by_side_and_a_grouped_query_model_too():
    heads = np.arange(4 * 3.0).reshape(1, 1, 4, 3)
    frames = [
        frame("raw", {"values": part.reshape(-1), "shape": part.shape}, (("tp", rank, 2),), rank, ["s", "b", "n", "d"])
        for rank, part in enumerate(np.split(heads, 2, axis=2))
    ]
    assert np.array_equal(merge_frames(frames).arrays["values"], heads)


@pytest.mark.parametrize("axes", [("tp",), ("sp",), ("cp",), ("tp", "cp")])
def test_raw_values_are_the_whole_tensor_again(axes):
    held = [(0, (), X)]
    for axis in axes:
        held = [
            (rank * 2 + index, (*shard, *cut), piece)
            for rank, shard, whole in held
            for index, cut, piece in parts(axis, 2, whole)
        ]
    frames = [frame("raw", {"values": p.reshape(-1), "shape": p.shape}, shard, rank) for rank, shard, p in held]
    assert np.array_equal(merge_frames(frames).arrays["values"], X)


def test_raw_values_that_were_cut_off_stay_apart():
    frames = [
        frame("raw", {"values": p.reshape(-1)[:4], "shape": p.shape}, shard, rank) for rank, shard, p in parts("tp", 2)
    ]
    merged = merge_frames(frames)
    assert set(merged.arrays) == {"values@0", "shape@0", "values@1", "shape@1"}


def test_tokens_are_in_their_order_wherever_they_were():
    wanted = [0, 3, 5, 6]
    held = {("cp", 0): [0, 1, 6, 7], ("cp", 1): [2, 3, 4, 5]}
    frames = []
    for rank, ((axis, index), positions) in enumerate(held.items()):
        mine = [position for position in wanted if position in positions]
        frames.append(frame("tokens", {"values": X[mine], "index": mine}, ((axis, index, 2),), rank))
    merged = merge_frames(frames)
    assert merged.arrays["index"].tolist() == wanted
    assert np.array_equal(merged.arrays["values"], X[wanted])


def test_rows_of_tensor_parallel_parts_are_joined_and_those_of_the_sequence_listed():
    tp = [
        frame("rows", {"values": piece.reshape(-1, 3)[[1, 5]], "index": [1, 5]}, shard, rank)
        for rank, shard, piece in parts("tp", 2)
    ]
    assert np.array_equal(merge_frames(tp).arrays["values"], X.reshape(-1, 6)[[1, 5]])
    sp = [
        frame("rows", {"values": piece.reshape(-1, 6)[[1]], "index": [1]}, shard, rank)
        for rank, shard, piece in parts("sp", 2)
    ]
    merged = merge_frames(sp)
    assert np.array_equal(merged.arrays["values"], X.reshape(-1, 6)[[1, 9]])
    assert merged.arrays["rank"].tolist() == [0, 1]


def test_what_is_laid_out_stays_apart_over_the_data():
    frames = [
        frame("raw", {"values": X.reshape(-1) + rank, "shape": X.shape}, (("dp", rank, 2),), rank) for rank in range(2)
    ]
    gathering = Gathering()
    found = [one for part in frames for one in gathering.add(part)]
    assert [one.key.data for one in found] == [(("dp", 0, 2),), (("dp", 1, 2),)]
    assert all(one.complete for one in found)


# ------------------------------------------------------------------ replicas, what is missing


def vectors(rank: int, shard, replica: int, value: float = 1.0, step: int = 120) -> Frame:
    return replace(
        frame("statistics", {"vector": vector_of([value]), "shift": [0.0]}, shard, rank), replica=replica, step=step
    )


def test_replicas_are_taken_once_and_those_that_differ_are_named():
    shards = [(("tp", 0, 2),), (("tp", 1, 2),)]
    frames = [vectors(rank, shards[rank % 2], rank // 2) for rank in range(4)]
    merged = merge_frames(frames)
    assert (merged.ranks, merged.alarms, merged.arrays["vector"][0]) == ((0, 1), (), 2)
    merged = merge_frames([*frames[:3], vectors(3, shards[1], 1, 1.0 + 2**-40)])
    assert merged.alarms == (
        "replicas disagree: layers.3.mlp.output, step 120, microbatch 0: rank 3 differs from rank 1",
    )


def test_replicas_are_compared_as_they_come():
    replicas = Replicas(most=2)
    frames = [vectors(0, (), 0), vectors(2, (), 1, 1.5), vectors(1, (), 2), vectors(0, (), 0, step=121)]
    said = [replicas.add(one, encode(one)[-96:]) for one in frames]
    assert said == [
        [],
        ["replicas disagree: layers.3.mlp.output, step 120, microbatch 0: rank 2 differs from rank 0"],
        [],
        [],
    ]
    nan = vectors(0, (), 0, float("nan"), step=122)
    assert not replicas.add(nan, b"same") + replicas.add(replace(nan, rank=1), b"same")  # NaN equals itself in bits


def test_what_is_missing_is_said():
    merged = merge_frames([vectors(1, (("tp", 1, 4), ("dp", 0, 1)), 0)])
    assert not merged.complete
    assert (
        merged.lacks()
        == "layers.3.mlp.output, step 120: without tp 0 of 4 dp 0 of 1; tp 2 of 4 dp 0 of 1; tp 3 of 4 dp 0 of 1"
    )


def gathered(gathering: Gathering, frames) -> list[Merged]:
    return [merged for one in frames for merged in gathering.add(one)]


def test_each_moment_is_given_once_when_its_parts_are_there():
    shards = [(("tp", 0, 2),), (("tp", 1, 2),)]
    gathering = Gathering()
    frames = [vectors(rank, shards[rank % 2], rank // 2, step=step) for step in (5, 6) for rank in (2, 1, 0, 3)]
    found = gathered(gathering, frames)
    assert [(one.key.step, one.complete) for one in found] == [(5, True), (6, True)]
    assert not gathering.rest()


def test_what_never_becomes_complete_is_given_up_in_time():
    gathering = Gathering(most=3)
    found = gathered(gathering, [vectors(0, (("tp", 0, 2),), 0, step=step) for step in range(5)])
    assert [one.key.step for one in found] == [0, 1]
    assert [one.key.step for one in gathering.older(3)] == [2]
    assert [one.key.step for one in gathering.rest()] == [3, 4]


def test_only_ranks_with_heads_that_were_asked_for_are_waited_for():
    def attention(rank):
        one = frame("raw", {"values": [1.0], "shape": [1]}, (("tp", rank, 2),), rank, meta={"heads": [rank * 2, 2, 4]})
        return replace(one, what="attention")

    gathering = Gathering({"s-1": [0, 1]}.get)
    assert len(gathered(gathering, [attention(0)])) == 1
    assert not gathered(Gathering({"s-1": [1, 2]}.get), [attention(0)])
    assert not gathered(Gathering(), [attention(0)])


def test_only_parts_that_lie_anywhere_are_waited_for():
    """A distributed optimizer may have all of a small parameter on two of its four ranks."""
    shards = [(("dp", index, 4),) for index in range(4)]
    gathering = Gathering(holders=lambda _frame: {shards[1], shards[2]})
    found = gathered(gathering, [vectors(1, shards[1], 0), vectors(2, shards[2], 0)])
    assert [(one.complete, one.arrays["vector"][0]) for one in found] == [(True, 2)]
    assert not gathered(Gathering(), [vectors(1, shards[1], 0), vectors(2, shards[2], 0)])


def test_components_of_tokens_on_other_ranks_share_axes_and_those_of_features_do_not():
    def part(rank, axis, labels):
        arrays = {
            "coordinates": np.ones((3, 2)) * rank,
            "variance": [4.0, 1.0],
            "total": [5.0],
            "index": [0, 1, 2],
            "axes": np.eye(6, 2),
            "mean": np.zeros(6),
            "count": [3.0],
        }
        return frame("pca", arrays, ((axis, rank, 2),), rank, labels, meta={"components": 1})

    merged = merge_frames([part(rank, "sp", LABELS) for rank in range(2)]).arrays
    assert merged["coordinates"].shape == (6, 1)  # those that were asked for; the other axis was for merging
    assert merged["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    apart = merge_frames([part(rank, "tp", ["s", "b", "f"]) for rank in range(2)]).arrays
    assert "coordinates@1" in apart


def test_a_frame_that_was_cut_for_the_way_comes_together():
    flat = X.reshape(-1)
    pieces = [
        frame("raw", {"values": piece}, meta={"part": [index, 3], "shapes": {"values": list(flat.shape), "shape": [3]}})
        for index, piece in enumerate(np.split(flat, 3))
    ]
    pieces[2] = replace(pieces[2], arrays={**pieces[2].arrays, "shape": np.array(X.shape)})
    gathering = Gathering()
    found = gathered(gathering, [decode(encode(piece)) for piece in (pieces[1], pieces[0], pieces[2])])
    assert len(found) == 1
    assert np.array_equal(found[0].arrays["values"], X)
    with pytest.raises(ValueError, match="only pieces"):
        merge_frames(pieces[:2])


def test_parts_that_do_not_fit_are_refused_or_left_apart():
    broken = frame("statistics", {"vector": np.zeros(3), "shift": [0.0]})
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.output, step 120: its parts do not fit together"):
        merge_frames([broken])
    odd = [
        frame("tokens", {"values": np.zeros((1, 2, size)), "index": [0]}, ((axis, rank, 2),), rank)
        for rank, (size, axis) in enumerate([(3, "sp"), (4, "sp")])
    ]
    assert "values@0" in merge_frames(odd).arrays
    with pytest.raises(ValueError, match="no frames"):
        merge_frames([])


WHOLE = np.arange(8 * 2 * 4 * 3, dtype=np.float32).reshape(8, 2, 4, 3)  # s, b, n, d: each value tells where it is


def placed(axes: tuple[str, ...], labels: list[str], tall: int = 1) -> list[Frame]:
    """Tiles of the parts of ``WHOLE``, cut along each of the axes into two, the outer first."""
    cut = [((), WHOLE.transpose(["sbnd".index(label) for label in labels]))]
    for axis in axes:
        at = labels.index("n" if axis == "tp" else "s")
        halved = [(shard, np.split(part, 4 if axis == "cp" else 2, axis=at)) for shard, part in cut]
        if axis == "cp":
            halved = [(shard, [np.concatenate((p[i], p[3 - i]), at) for i in range(2)]) for shard, p in halved]
        cut = [((*shard, (axis, index, 2)), pieces[index]) for shard, pieces in halved for index in range(2)]
    found = []
    for rank, (shard, part) in enumerate(cut):
        matrix = part.reshape(-1, part.shape[-1])
        levels = np.zeros((-(-len(matrix) // tall), 3), np.uint8)
        levels[:] = matrix[::tall, :1] // 3  # which row of the whole each row of tiles begins with
        first = {name: index for name, index, _ in shard}.get("tp", 0) * 2
        meta = {"shape": list(part.shape), "heads": [first, part.shape[labels.index("n")], 4]}
        arrays = {
            "tiles": levels,
            "scale": np.array([0, 253], np.float32),
            "extent": np.array([*matrix.shape, tall, 1]),
        }
        found.append(frame("tiles", arrays, shard, rank, labels, meta=meta))
    return found


@pytest.mark.parametrize("labels", ["sbnd", "bsnd", "bnsd"])
@pytest.mark.parametrize("axes", [("tp",), ("sp",), ("cp",), ("cp", "tp"), ("tp", "cp"), ("cp", "sp", "tp")])
def test_rows_of_tiles_say_where_in_the_whole_tensor_they_are(axes, labels):
    arrays = merge_frames(placed(axes, list(labels))[::-1]).arrays
    places = arrays["places"]
    assert places.shape == (64, 2, 3)
    sides = {"s": 8, "b": 2, "n": 4}
    rows = np.arange(64).reshape(8, 2, 4).transpose(["sbn".index(label) for label in labels[:3]])
    assert arrays["values"][:, 0].tolist() == rows[tuple(places[:, 0].T)].tolist()
    assert np.array_equal(places[:, 0], places[:, 1])
    assert len(np.unique(places[:, 0], axis=0)) == 64
    assert places.max(axis=(0, 1)).tolist() == [sides[label] - 1 for label in labels[:3]]


def test_a_row_of_tiles_says_its_block_or_that_it_is_none():
    two = merge_frames(placed(("tp",), list("sbnd"), tall=4)).arrays["places"]
    assert two[0].tolist() == [[0, 0, 0], [0, 1, 1]]
    assert two[8].tolist() == [[0, 0, 2], [0, 1, 3]]
    odd = merge_frames(placed(("tp",), list("sbnd"), tall=3)).arrays["places"]
    assert odd[0].tolist() == [[0, 0, 0], [-1, -1, -1]]
    assert odd[10].tolist() == [[7, 1, 0], [7, 1, 1]]  # the last ones of the first part
    row = {"values": np.zeros((1, 3)), "index": np.array([5])}
    rows = [replace(one, what="rows", arrays=row) for one in placed(("tp",), list("sbnd"))]
    assert merge_frames(rows).arrays["places"][:, 0].tolist() == [[1, 0, 1], [1, 0, 3]]
    unsaid = [replace(one, meta={"labels": list("sbnd")}) for one in placed(("tp",), list("sbnd"))]
    assert "places" not in merge_frames(unsaid).arrays
