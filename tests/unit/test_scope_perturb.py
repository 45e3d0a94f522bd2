"""Every kind against what numpy makes of the same values, and the same on replicas, shards and in a second pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.perturb import philox
from trimtab.scope.perturb.apply import Applied, Applier, disturb
from trimtab.scope.perturb.place import place_of
from trimtab.scope.perturbation import Perturbation, digest

AT = Moment(3, 1)
SHAPE = (8, 2, 12)  # sequence, batch, hidden
TAP = Tap("layers.3.mlp.output", "activation", ("s", "b", "h"), SHAPE, "float32")
ALL = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def perturbation(kind: str, part: dict[str, Any] | None = None, **parameters: Any) -> Perturbation:
    more = {"part": part} if part else {}
    return Perturbation.from_dict(
        {"pattern": "layers.*.**", "kind": kind, "first": 2, "last": 4, "seed": 7, "parameters": parameters | more}
    )


def tensor(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)


def disturbed(said: Perturbation, x: torch.Tensor, tap: Tap = TAP, moment: Moment = AT) -> torch.Tensor:
    answer = Applier(said, tap).apply(x, moment)
    assert answer is not None
    assert (answer.dtype, answer.shape, answer.stride()) == (x.dtype, x.shape, x.stride())
    assert answer._base is None
    return answer


def bits(x: torch.Tensor) -> np.ndarray:
    return x.detach().contiguous().view(torch.uint8).numpy().copy()


def numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def rounded(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """As the wide type, then once to the tensor's own."""
    wide = torch.float64 if like.dtype is torch.float64 else torch.float32
    return torch.from_numpy(values).to(wide).to(like.dtype)


def words(size: int, purpose: int) -> tuple[np.ndarray, np.ndarray]:
    """Philox in numpy, for the elements of a whole tensor."""
    key = int.from_bytes(digest("key", 7, TAP.name)[:8], "little")
    c = [np.arange(size, dtype=np.uint64), np.zeros(size, np.uint64)]
    c += [np.full(size, AT.step, np.uint64), np.full(size, AT.microbatch << 8 | purpose, np.uint64)]
    low, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> low) ^ c[1] ^ k0, p1 & mask, (p0 >> low) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return c[0], c[1]


def noise(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    first, second = (word.astype(np.float64) for word in words(int(np.prod(shape)), 0))
    return (np.sqrt(-2 * np.log((first + 1) / 2**32)) * np.cos(second * (2 * np.pi / 2**32))).reshape(shape)


def share() -> np.ndarray:
    return (words(int(np.prod(SHAPE)), 0)[0] / 2**32).reshape(SHAPE)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_words_that_its_authors_published(counter: Any, key: Any, expected: Any) -> None:
    found = philox.philox(tuple(torch.tensor([word]) for word in counter), key)  # pyright: ignore[reportArgumentType]
    assert tuple(int(word) for word in found) == expected


@pytest.mark.parametrize("dtype", ALL)
def test_arithmetic_kinds_are_those_of_numpy(dtype: torch.dtype) -> None:
    x = tensor(dtype)
    wide = np.float64 if dtype is torch.float64 else np.float32
    values = numbers(x).astype(wide)
    rms = np.sqrt(np.mean(values.astype(np.float64) ** 2)).astype(wide)
    normal = noise().astype(wide)
    for said, expected in [
        (perturbation("gaussian", std=0.5), values + normal * wide(0.5)),
        (perturbation("offset", value=0.25), values + wide(0.25)),
        (perturbation("uniform", low=0.5, high=2.0), values * (0.5 + 1.5 * share()).astype(wide)),
        (perturbation("scale", factor=-1.5), values * wide(-1.5)),
        (perturbation("zero"), np.zeros(SHAPE)),
        (perturbation("stuck", {"fraction": 1.0}, value=2.0), np.full(SHAPE, 2.0)),
    ]:
        assert np.array_equal(bits(disturbed(said, x)), bits(rounded(expected, x))), said.kind
    relative = numbers(disturbed(perturbation("gaussian", std=0.5, relative=True), x))
    eps = max(torch.finfo(dtype).eps, 1e-6)
    np.testing.assert_allclose(relative, values + normal * rms * 0.5, rtol=eps, atol=2 * torch.finfo(dtype).tiny)


@pytest.mark.parametrize("dtype", [*ALL, torch.int32, torch.int64, torch.uint8])
def test_flips_change_exactly_the_chosen_bits_and_twice_is_not_at_all(dtype: torch.dtype) -> None:
    x = tensor(dtype)
    width = x.element_size() * 8
    for wanted in ([0], [width - 1], [0, width - 2]):
        said = perturbation("bit-flip", {"fraction": 1.0}, bits=wanted)
        flipped = disturbed(said, x)
        changed = bits(flipped).reshape(-1, x.element_size()) ^ bits(x).reshape(-1, x.element_size())
        mask = int.from_bytes(bytes(changed[0]), "little")
        assert mask == sum(1 << bit for bit in wanted)
        assert (changed == changed[0]).all()
        assert np.array_equal(bits(disturbed(said, flipped)), bits(x))


@pytest.mark.parametrize(
    ("name", "allowed"), [("sign", [15]), ("exponent", range(7, 15)), ("mantissa", range(7)), ("random", range(16))]
)
def test_bits_by_name_are_drawn_for_each_element_from_their_field(name: str, allowed: Any) -> None:
    x = tensor(torch.bfloat16, (64, 2, 12))
    flipped = disturbed(perturbation("bit-flip", {"fraction": 1.0}, bits=[name]), x)
    masks = (flipped.view(torch.int16) ^ x.view(torch.int16)).numpy().view(np.uint16).reshape(-1)
    assert set(np.log2(masks).astype(int)) == set(allowed)
    assert (np.bitwise_count(masks) == 1).all()


def test_the_log_says_which_elements_and_what_they_were_and_became() -> None:
    said: list[Applied] = []
    x = tensor(torch.bfloat16)
    applier = Applier(perturbation("bit-flip", {"indices": [5, 29]}, bits=[6]), TAP, said.append)
    after = applier.apply(x, AT)
    assert after is not None
    (one,) = said
    assert (one.elements, one.size, one.indices, one.step, one.microbatch) == (2, x.numel(), (5, 29), 3, 1)
    flat, flipped = x.reshape(-1), after.reshape(-1)
    assert one.old == tuple(flat[[5, 29]].float().tolist())
    assert one.new == tuple(flipped[[5, 29]].float().tolist())
    assert int(one.old_bits[0], 16) ^ int(one.new_bits[0], 16) == 1 << 6
    assert (flat != flipped).nonzero().reshape(-1).tolist() == [5, 29]


def test_parts_are_tokens_heads_channels_and_shares_of_them() -> None:
    tap = Tap(
        "layers.3.attention.q",
        "activation",
        ("s", "b", "n", "d"),
        (8, 2, 4, 6),
        "float32",
        heads=(4, 4, 8),
        shard=(("tp", 1, 2),),
    )
    x = torch.ones(8, 2, 4, 6)
    said = perturbation("mask", {"tokens": [1, 5], "heads": [0, 5]}, value=9.0)
    expected = np.ones((8, 2, 4, 6))
    expected[np.ix_([1, 5], [0, 1], [1], range(6))] = 9.0  # head 5 is this rank's second
    assert np.array_equal(numbers(disturbed(said, x, tap)), expected)
    channels = numbers(disturbed(perturbation("zero", {"channels": [3]}), x, tap))
    assert np.array_equal(channels, np.ones((8, 2, 4, 6)) * (np.arange(6) != 3))
    flat = Tap("layers.3.attention.core", "activation", ("s", "b", "h"), (8, 2, 24), heads=(4, 4, 8))
    heads = numbers(disturbed(perturbation("zero", {"heads": [4]}), torch.ones(8, 2, 24), flat))
    assert np.array_equal(heads, np.ones((8, 2, 24)) * (np.arange(24) >= 6))
    some = numbers(disturbed(perturbation("mask", {"fraction": 0.5, "tokens": [2]}), torch.ones(8, 2, 512), flat))
    assert 0.4 < (some[2] == 0).mean() < 0.6
    assert (np.delete(some, 2, 0) == 1).all()


def test_gradients_pass_as_the_kinds_say() -> None:
    for said, expected in [
        (perturbation("gaussian", std=0.5), 1.0),
        (perturbation("offset", value=2.0), 1.0),
        (perturbation("bit-flip", {"elements": 4}, bits=[3]), 1.0),
        (perturbation("bit-flip", {"fraction": 1.0}, bits=["mantissa"]), 1.0),
        (perturbation("scale", factor=-3.0), -3.0),
        (perturbation("zero"), 0.0),
        (perturbation("stuck", {"fraction": 1.0}, value=1.0), 0.0),
    ]:
        x = tensor().requires_grad_()
        disturbed(said, x).sum().backward()
        assert x.grad is not None
        assert (x.grad == expected).all(), said
    x = tensor().requires_grad_()
    kept = disturbed(perturbation("mask", {"tokens": [1]}), x)
    kept.sum().backward()
    assert x.grad is not None
    assert np.array_equal(numbers(x.grad), np.ones(SHAPE) * (np.arange(8) != 1)[:, None, None])
    factors = disturbed(perturbation("uniform", low=0.5, high=2.0), y := tensor().requires_grad_())
    factors.sum().backward()
    assert y.grad is not None
    np.testing.assert_allclose(numbers(y.grad), 0.5 + 1.5 * share(), rtol=1e-6)


def test_what_was_saved_for_the_backward_pass_is_not_written() -> None:
    weight = tensor().requires_grad_()
    x = (weight * weight).detach().requires_grad_()
    y = x.exp()  # saves its own output
    before, version = bits(y), y._version
    disturbed(perturbation("zero"), y).sum().backward()
    assert y._version == version
    assert np.array_equal(bits(y), before)


AXES: list[tuple[str, tuple[str, ...], int]] = [
    ("tp", ("s", "b", "f"), 2),
    ("tp", ("s", "b", "n", "d"), 2),
    ("sp", ("s", "b", "h"), 0),
    ("dp", ("s", "b", "h"), 1),
    ("fsdp", ("out/fsdp", "in"), 0),
    ("tp", ("out", "in/tp"), 1),
]
KINDS = [
    perturbation("gaussian", std=0.5),
    perturbation("uniform", low=0.0, high=2.0),
    perturbation("bit-flip", {"elements": 5}, bits=["random", "sign"]),
    perturbation("bit-flip", {"fraction": 0.3}, bits=["mantissa"]),
    perturbation("mask", {"indices": [0, 7, 100, 191]}, value=5.0),
    perturbation("stuck", value=3.0),
]


@pytest.mark.parametrize("said", KINDS, ids=[f"{one.kind}-{index}" for index, one in enumerate(KINDS)])
@pytest.mark.parametrize(
    ("axis", "labels", "dimension"), AXES, ids=["-".join((a, *ls)).replace("/", "_") for a, ls, _ in AXES]
)
def test_shards_get_the_parts_of_what_the_whole_gets(
    said: Perturbation, axis: str, labels: tuple[str, ...], dimension: int
) -> None:
    shape = {2: (16, 12), 3: SHAPE, 4: (8, 2, 4, 3)}[len(labels)]
    x = tensor(torch.bfloat16, shape)
    whole = disturbed(said, x, Tap(TAP.name, "activation", labels))
    for count in (2, 4) if shape[dimension] % 4 == 0 else (2,):
        parts = [
            disturbed(said, part.contiguous(), Tap(TAP.name, "activation", labels, shard=((axis, index, count),)))
            for index, part in enumerate(x.chunk(count, dimension))
        ]
        assert np.array_equal(bits(torch.cat(parts, dimension)), bits(whole))


@pytest.mark.parametrize(("rows", "ranks"), [(10, 4), (5, 4), (7, 3)])
def test_parts_that_are_not_equal_are_still_those_of_the_whole(rows: int, ranks: int) -> None:
    """FSDP gives the last ranks less, or nothing."""
    whole = torch.arange(rows * 3).reshape(rows, 3)
    labels = ("out/fsdp", "in")
    for index, part in enumerate([*whole.chunk(ranks), *[whole[:0]] * ranks][:ranks]):
        place = place_of(Tap("p", "parameter", labels, shard=(("fsdp", index, ranks),)), part.shape, (rows, 3))
        assert place.whole == (rows, 3)
        assert torch.equal(place.index(torch.device("cpu")).expand(part.shape), part)
        assert place.here(range(place.size))[0] == part.reshape(-1).tolist()


def test_the_two_ends_of_a_sequence_under_context_parallelism_are_put_where_they_belong() -> None:
    x = tensor(torch.float32, (16, 2, 3))
    said = perturbation("gaussian", std=1.0)
    whole = disturbed(said, x)
    for rank in range(2):
        mine = [*range(rank * 4, rank * 4 + 4), *range(12 - rank * 4, 16 - rank * 4)]
        for part in range(2):  # sequence parallelism cuts it once more
            rows = mine[part * 4 : part * 4 + 4]
            tap = Tap(TAP.name, "activation", ("s", "b", "h"), shard=(("cp", rank, 2), ("sp", part, 2)))
            assert torch.equal(disturbed(said, x[rows], tap), whole[rows])


def test_replicas_and_second_passes_are_alike_and_moments_are_not() -> None:
    x = tensor(torch.bfloat16)
    for said in KINDS:
        first = Applier(said, TAP)
        once = first.apply(x, AT)
        assert once is not None
        for other in (Applier(said, TAP).apply(x, AT), first.apply(x, AT._replace(recompute=True))):
            assert other is not None
            assert np.array_equal(bits(once), bits(other))
        later = first.apply(x, Moment(4, 0))
        fixed = said.kind == "stuck" or "indices" in said.parameters.get("part", {})
        assert later is not None
        assert np.array_equal(bits(once), bits(later)) == fixed
        elsewhere = Applier(said, Tap("layers.4.mlp.output", "activation", ("s", "b", "h"))).apply(x, AT)
        assert elsewhere is not None
        assert said.kind == "mask" or not np.array_equal(bits(once), bits(elsewhere))


def test_stale_gives_the_content_of_the_time_before_also_in_a_second_pass() -> None:
    said = perturbation("stale")
    logged: list[Applied] = []
    applier = Applier(said, TAP, logged.append)
    xs = [tensor() + step for step in range(5)]
    leaves = [x.requires_grad_() for x in xs]
    assert applier.apply(leaves[0], Moment(1, 0)) is None  # not yet in force
    stale = applier.apply(leaves[1], Moment(2, 0))
    assert stale is not None
    assert torch.equal(stale, xs[0])
    assert torch.equal(applier.apply(leaves[2], Moment(2, 1)), xs[1])  # pyright: ignore[reportArgumentType]
    again = applier.apply(leaves[1], Moment(2, 0, True))
    assert again is not None
    assert torch.equal(again, xs[0])
    stale.sum().backward()
    assert (leaves[1].grad == 1).all()  # pyright: ignore[reportOptionalMemberAccess]
    assert applier.apply(leaves[3], Moment(5, 0)) is None  # over
    assert [(one.step, one.microbatch) for one in logged] == [(2, 0), (2, 1)]


def test_it_acts_in_its_steps_and_microbatches_only_and_as_often_as_it_is_said() -> None:
    x = tensor()
    said = Perturbation.from_dict(
        {"pattern": "**", "kind": "zero", "first": 2, "last": 3, "microbatches": [1], "probability": 1.0}
    )
    acted = [(s, m) for s in range(5) for m in range(3) if Applier(said, TAP).apply(x, Moment(s, m)) is not None]
    assert acted == [(2, 1), (3, 1)]
    rare = Perturbation.from_dict({"pattern": "**", "kind": "zero", "first": 0, "last": 999, "probability": 0.25})
    happened = [rare.happens(TAP.name, step, 0) for step in range(1000)]
    assert 200 < sum(happened) < 300
    assert happened == [Perturbation.from_dict(rare.as_dict()).happens(TAP.name, step, 0) for step in range(1000)]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_indices_are_found_where_they_lie(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dimension = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, 3))
    labels = tuple(f"d{i}" + ("/tp" if i == dimension else "") for i in range(len(shape)))
    whole = list(shape)
    whole[dimension] *= count
    indices = torch.arange(int(np.prod(whole))).reshape(whole)
    for index, part in enumerate(indices.chunk(count, dimension)):
        place = place_of(Tap("x", "activation", labels, shard=(("tp", index, count),)), part.shape)
        assert torch.equal(place.index(torch.device("cpu")).expand(part.shape), part)
        found, coordinates = place.here(range(place.size))
        assert found == sorted(part.reshape(-1).tolist())
        assert all(int(part[at]) == number for number, at in zip(found, coordinates, strict=True))


def test_what_a_tensor_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="no dimension of heads"):
        disturb(perturbation("zero", {"heads": [1]}), TAP, tensor(), AT)
    with pytest.raises(ValueError, match="channel 12 is not there: it has 12, counted from 0"):
        disturb(perturbation("zero", {"channels": [12]}), TAP, tensor(), AT)
    assert disturb(perturbation("zero", {"tokens": [99]}), TAP, tensor(), AT).tensor.equal(tensor())
    with pytest.raises(ValueError, match="float32 has 0 to 31"):
        disturb(perturbation("bit-flip", bits=[40]), TAP, tensor(), AT)
    with pytest.raises(ValueError, match="int64: gaussian is for floating-point numbers"):
        disturb(perturbation("gaussian", std=1.0), TAP, torch.arange(4), AT)
