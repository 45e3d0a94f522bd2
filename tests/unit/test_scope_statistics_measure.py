"""What a subscription gets of a tensor: each kind, parts of the tensor, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trimtab.scope import vector as v
from trimtab.scope.device import choice
from trimtab.scope.device.measure import MeasureState, check, measure
from trimtab.scope.names import Shard, Tap
from trimtab.scope.subscription import Subscription

HIDDEN = Tap("layers.1.output", "activation", ("s", "b", "h"))
QUERY = Tap("layers.1.attention.q", "activation", ("s", "b", "n", "d"), heads=(4, 4, 16))
CORE = Tap("layers.1.attention.core", "activation", ("s", "b", "h"), heads=(4, 4, 16))
WEIGHT = Tap("parameters.layers.1.mlp.linear.weight", "parameter", (), (8, 6))


def state_of(tap: Tap) -> MeasureState:
    state = MeasureState()
    state.tap, state.labels = tap, tap.labels
    return state


def subscription(what: Any, heads: tuple[int, ...] | None = None, **parameters: Any) -> Subscription:
    wanted = Subscription("**", what, heads=heads, parameters=parameters)
    return Subscription.from_dict(wanted.as_dict())


def measured(x: torch.Tensor, wanted: Subscription, tap: Tap = HIDDEN) -> dict[str, torch.Tensor]:
    check(wanted, tap)
    return measure(x, wanted, state_of(tap))


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def test_statistics_and_histogram() -> None:
    x = hidden(5, 2, 8).to(torch.bfloat16)
    found = measured(x, subscription("statistics"))
    assert list(found) == ["vector", "shift"]
    assert found["vector"].tolist() == pytest.approx(v.vector_of(x.double().numpy(), float(found["shift"])).tolist())
    found = measured(x, subscription("histogram"))
    assert found["exponents"].tolist() == v.exponents_of(x.double().numpy()).tolist()


def test_tiles_tell_their_extent() -> None:
    found = measured(hidden(10, 2, 8), subscription("tiles", grid=[3, 4], reduction="rms"))
    assert found["tiles"].shape == (3, 4)
    assert found["extent"].tolist() == [20, 8, 7, 2]
    assert found["scale"].shape == (2,)


def test_rows_and_tokens_keep_the_type_and_say_which_they_are() -> None:
    for dtype in (torch.bfloat16, torch.float8_e5m2):
        x = hidden(6, 2, 8).to(dtype)
        found = measured(x, subscription("rows", rows=[3, 0, 99]))
        assert found["index"].tolist() == [3, 0]
        assert torch.equal(found["values"].float(), x.float().reshape(12, 8)[[3, 0]])
        found = measured(x, subscription("tokens", tokens=[5, 2]))
        assert found["values"].dtype == dtype
        assert torch.equal(found["values"].float(), x.float()[[5, 2]])
    assert measured(hidden(6, 2, 8), subscription("tokens", tokens=[6])) == {}
    assert measured(hidden(6, 2, 8), subscription("rows", rows=[12])) == {}


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("sp", [1, 2])
def test_each_token_of_a_sharded_sequence_comes_from_one_rank(cp: int, sp: int) -> None:
    length = 16
    whole = hidden(length, 1, 4)
    wanted = [0, 3, 7, 8, 13, 15]
    found: dict[int, torch.Tensor] = {}
    for i in range(cp):
        pieces = whole.chunk(2 * cp)
        part = whole if cp == 1 else torch.cat([pieces[i], pieces[2 * cp - 1 - i]])
        for j, mine in enumerate(part.chunk(sp)):
            shard: Shard = (("cp", i, cp), ("sp", j, sp))
            tap = Tap(HIDDEN.name, "activation", HIDDEN.labels, shard=shard)
            arrays = measured(mine, subscription("tokens", tokens=wanted), tap)
            for position, value in zip(arrays.get("index", torch.empty(0)), arrays.get("values", ()), strict=True):
                assert int(position) not in found
                found[int(position)] = value
    assert sorted(found) == wanted
    assert all(torch.equal(found[position], whole[position]) for position in wanted)


def test_raw_is_the_beginning_within_the_limit() -> None:
    x = hidden(6, 4, 8)
    found = measured(x, subscription("raw", bytes=100))
    assert torch.equal(found["values"], x.reshape(-1)[:25])
    assert found["shape"].tolist() == [6, 4, 8]
    strided = x.permute(2, 0, 1)
    for limit in (4, 100, 300, 10_000):
        values = measured(strided, subscription("raw", bytes=limit))["values"]
        assert torch.equal(values, strided.reshape(-1)[: limit // 4])
        assert values.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert measured(torch.tensor(3.0), subscription("raw", bytes=1))["values"].tolist() == [3.0]


@pytest.mark.parametrize("tap", [QUERY, CORE], ids=["a dimension", "with their elements"])
def test_heads_are_numbers_of_the_whole_model(tap: Tap) -> None:
    x = hidden(3, 2, 4, 8)
    shaped = x if tap is QUERY else x.flatten(-2)
    found = measured(shaped, subscription("raw", heads=(0, 5, 7)), tap)
    assert torch.equal(found["values"], x[:, :, [1, 3]].reshape(-1))
    assert found["shape"].tolist() == ([3, 2, 2, 8] if tap is QUERY else [3, 2, 16])
    assert measured(shaped, subscription("statistics", heads=(0, 8)), tap) == {}, "none of them is here"
    assert measured(shaped, subscription("statistics", heads=(4, 5, 6, 7)), tap)["vector"][v.N] == x.numel()


def test_a_single_number_has_statistics() -> None:
    loss = Tap("loss", "activation", (), ())
    assert measured(torch.tensor(2.5), subscription("statistics"), loss)["vector"][v.MAX] == 2.5
    assert measured(torch.zeros(0, 4), subscription("statistics"))["vector"].tolist() == v.empty().tolist()
    assert measured(torch.zeros(0, 4), subscription("tiles")) == {}


def test_autocast_of_the_job_does_not_reach_the_products() -> None:
    x = hidden(32, 2, 16)
    plain = measured(x, subscription("pca"))
    with torch.autocast("cpu", torch.bfloat16):
        same = measured(x, subscription("pca"))
    assert torch.equal(plain["coordinates"], same["coordinates"])


REFUSED: list[tuple[Subscription, Tap, str]] = [
    (Subscription("**", "attention"), HIDDEN, "cannot be measured of a tensor"),
    (Subscription("**", "statistics", heads=(1,)), HIDDEN, "no heads to choose from"),
    (Subscription("**", "statistics", heads=(0, 16)), QUERY, "head 16 is not there, they count from 0 to 15"),
    (Subscription("**", "tokens"), WEIGHT, "a parameter has no tokens"),
    (Subscription("**", "pca"), WEIGHT, "a parameter has no tokens"),
    (Subscription("**", "tiles", parameters={"dims": ["s", "x"]}), HIDDEN, "dims s,x are not two of its s, b, h"),
    (Subscription("**", "tiles", parameters={"reduction": "sum"}), HIDDEN, "'sum' is unknown; one of mean"),
    (Subscription("**", "rows"), Tap("loss", "activation", (), ()), "a single number"),
    (Subscription("**", "pca"), Tap("x", "activation", ("h",), (4,)), "a token needs features"),
]


@pytest.mark.parametrize(("wanted", "tap", "why"), REFUSED)
def test_what_cannot_be_measured_is_refused_in_a_line(wanted: Subscription, tap: Tap, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        check(wanted, tap)
    assert "\n" not in str(refused.value)
    assert tap.name in str(refused.value)


def test_complex_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        measure(torch.zeros(2, dtype=torch.complex64), subscription("statistics"), MeasureState())


def test_the_sequence_is_found_by_its_label() -> None:
    assert choice.sequence_dimension(("b", "s", "h")) == 1
    assert choice.sequence_dimension(()) == 0
    assert choice.local_tokens([-1, -16, -17], 8, (("sp", 1, 2),)) == ([7], [15])
