"""What can be said of a perturbation, in JSON and in words, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scope.floats import FORMATS, bits_problem, choices, width
from trimtab.scope.names import Tap
from trimtab.scope.paired import PairSpec
from trimtab.scope.perturb.wording import describe, preview
from trimtab.scope.perturbation import KINDS, SOON, Perturbation

TAPS = [
    Tap("layers.3.mlp.output", "activation", ("s", "b", "h"), (128, 2, 64), "bfloat16", layer=3),
    Tap(
        "layers.3.attention.q",
        "activation",
        ("s", "b", "n", "d"),
        (128, 2, 4, 16),
        "bfloat16",
        (("tp", 1, 2),),
        0,
        3,
        (4, 4, 8),
    ),
    Tap("parameters.decoder.layers.3.weight", "parameter", ("out", "in"), (64, 64), "bfloat16", layer=3),
]
NEEDED: dict[str, dict[str, Any]] = {
    "gaussian": {"std": 0.1},
    "uniform": {"low": 0.9, "high": 1.1},
    "offset": {"value": -1.0},
    "scale": {"factor": 2.0},
    "mask": {"part": {"tokens": [1]}},
    "stuck": {"value": 0.5},
    "delay": {"ms": 5},
}


def said(kind: str = "zero", pattern: str = "layers.3.mlp.output", **more: Any) -> Perturbation:
    value = {"pattern": pattern, "kind": kind, "parameters": NEEDED.get(kind, {})} | more
    return Perturbation.from_dict(value)


@pytest.mark.parametrize(
    ("perturbation", "text"),
    [
        (
            said("bit-flip", parameters={"bits": [14]}, ranks=[2], first=120, last=122),
            "flips bit 14 of 1 element in layers.3.mlp.output on rank 2, steps 120-122",
        ),
        (
            said("gaussian", "layers.*.output", layers=[1, 2, 5], parameters={"std": 0.1, "relative": True}, last=4),
            "adds normal noise of deviation 0.1 times the rms to layers.*.output of layers 1-2, 5, in the next 5 steps",
        ),
        (
            said("zero", parameters={"part": {"heads": [3], "fraction": 0.25}}, microbatches=[0, 2], first=7),
            "zeroes 0.25 of the elements of head 3 in layers.3.mlp.output, step 7, microbatches 0, 2",
        ),
        (
            said(
                "stuck",
                "parameters.x",
                parameters={"value": 1, "where": "both", "revert": True},
                probability=0.5,
                first=1,
            ),
            "holds 1 element in parameters.x at 1 in both copies, step 1, with probability 0.5, then puts it back",
        ),
        (said("delay", "collectives.*.all_reduce"), "delays collectives.*.all_reduce by 5 ms, in the next step"),
        (
            said("bit-flip", "logits", parameters={"bits": ["sign", "exponent"], "part": {"fraction": 1.0}}),
            "flips the sign and a random bit of the exponent of 1 of the elements in logits, in the next step",
        ),
    ],
)
def test_words(perturbation: Perturbation, text: str) -> None:
    assert describe(perturbation) == text


@pytest.mark.parametrize("kind", KINDS)
def test_json_both_ways(kind: str) -> None:
    one = said(kind, "layers.*.output", first=3, last=9, seed=5, ranks=[1, 2], layers=[0], microbatches=[1], id="p7")
    assert Perturbation.from_dict(one.as_dict()) == one
    assert describe(one)
    assert one.problems() == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"kind": "zero"}, "pattern is missing"),
        ({"pattern": "a"}, "kind is missing"),
        ({"pattern": "a", "kind": "gausian"}, "gaussian?"),
        ({"pattern": "a", "kind": "gaussian"}, "std is missing"),
        ({"pattern": "a..b", "kind": "zero"}, "empty segment"),
        ({"pattern": "a", "kind": "zero", "first": 5, "last": 4}, "the last (4) is before the first (5)"),
        ({"pattern": "a", "kind": "zero", "first": 0, "last": 100_000}, "at most 100000"),
        ({"pattern": "a", "kind": "zero", "probability": 0}, "probability: above 0"),
        ({"pattern": "a", "kind": "zero", "ranks": []}, "ranks: 1 to 4096"),
        ({"pattern": "a", "kind": "zero", "seed": -1}, "seed is to be a whole number"),
        ({"pattern": "a", "kind": "zero", "rank": 1}, "'rank' is unknown; ranks?"),
        ({"pattern": "a", "kind": "zero", "parameters": {"value": 1}}, "'value' is unknown"),
        ({"pattern": "a", "kind": "zero", "parameters": {"part": {}}}, "part is to say which"),
        ({"pattern": "a", "kind": "mask"}, "part is missing"),
        ({"pattern": "a", "kind": "zero", "parameters": {"part": {"elements": 1, "heads": [1]}}}, "stand alone"),
        ({"pattern": "a", "kind": "zero", "parameters": {"part": {"heads": []}}}, "empty list"),
        ({"pattern": "a", "kind": "zero", "parameters": {"part": {"fraction": 1.5}}}, "from 0 to 1"),
        ({"pattern": "a", "kind": "uniform", "parameters": {"low": 2, "high": 1}}, "high (1) is below low (2)"),
        (
            {"pattern": "a", "kind": "gaussian", "parameters": {"std": float("nan")}},
            "std is to be a finite number from 0 on, not nan",
        ),
        ({"pattern": "a", "kind": "bit-flip", "parameters": {"bits": ["exponents"]}}, "'exponents' is none"),
        ({"pattern": "a", "kind": "bit-flip", "parameters": {"bits": [3, 3]}}, "said twice"),
        ({"pattern": "a", "kind": "bit-flip", "parameters": {"bits": [True]}}, "bits: True is none"),
        ({"pattern": "a", "kind": "delay", "parameters": {"ms": 1e6}}, "from 0 to 60000"),
        ({"pattern": "a", "kind": "stuck", "parameters": {"value": 1, "where": "both!"}}, "where is to be one of"),
        ([], "expected an object"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        Perturbation.from_dict(value)
    assert reason in str(caught.value)


def test_problems_with_what_there_is_to_disturb() -> None:
    assert said().problems(TAPS) == []
    (missing,) = said(pattern="layers.3.mlp.outptu").problems(TAPS)
    assert "no tap matches" in missing
    assert "layers.3.mlp.output" in missing
    assert said("stale", "parameters.**").problems(TAPS) == [
        "parameters.decoder.layers.3.weight: stale is for activation, gradient, communication; this is parameter"
    ]
    (bit,) = said("bit-flip", parameters={"bits": [16]}).problems(TAPS)
    assert "bit 16 is not there: bfloat16 has 0 to 15" in bit
    master = {"bits": [30], "where": "master"}
    assert said("bit-flip", "parameters.**", parameters=master).problems(TAPS) == []
    (heads,) = said("mask", parameters={"part": {"heads": [1]}}).problems(TAPS)
    assert "it has no heads" in heads
    assert said("delay", "collectives.x.all_reduce").problems(TAPS) == []  # not known before it happens


def test_elements_and_heads_that_are_not_there_are_refused_where_the_size_is_known() -> None:
    def problems(pattern: str, *taps: Tap, **part: list[int]) -> list[str]:
        return said("zero", pattern, parameters={"part": part}).problems(taps or TAPS)

    q = "layers.3.attention.q"
    assert problems(q, heads=[7]) == []
    assert problems(q, heads=[0, 8]) == [f"{q}: head 8 is not there: it has 8, counted from 0"]
    assert problems(q, indices=[2 * 128 * 2 * 4 * 16 - 1]) == []  # of the two ranks together
    assert "element 32768 is not there" in problems(q, indices=[32768])[0]
    unseen = Tap("logits", "activation", ("s", "b", "v"))
    assert problems("logits", unseen, indices=[99_999_999]) == []
    uneven = Tap("parameters.w", "parameter", ("out", "in"), (1, 4), "float32", (("fsdp", 3, 4),))
    assert problems("parameters.w", uneven, indices=[30]) == []  # the others may hold more rows than this rank


def test_a_preview_says_what_would_be_touched() -> None:
    (one,) = preview(said("bit-flip", parameters={"bits": [14], "part": {"elements": 3}}), TAPS)
    assert (one.tap, one.elements, one.note) == ("layers.3.mlp.output", 3, "bit 14 is exponent[7] of bfloat16")
    for indices, elements in (([5, 99_999_999], 1), ([99_999_999], 0)):
        (some,) = preview(said(parameters={"part": {"indices": indices}}), TAPS)
        assert some.elements == elements
    cut = Tap("parameters.w", "parameter", ("out", "in"), (1, 4), "float32", (("tp", 0, 2),))
    for wanted, elements in (({"elements": 1}, 1), ({"elements": 6}, 4), ({"indices": [2, 6]}, 2)):
        (some,) = preview(said("zero", "parameters.w", parameters={"part": wanted}), [cut])
        assert (some.elements, some.at_most) == (elements, True)  # they may lie in the other rank's half
    (some,) = preview(said("zero", "parameters.w", parameters={"part": {"fraction": 0.5}}), [cut])
    assert (some.elements, some.at_most) == (2, False)  # half of what is here
    (heads,) = preview(
        said("zero", "layers.*.attention.q", parameters={"part": {"heads": [0, 5], "tokens": [1, 2]}}), TAPS
    )
    assert heads.elements == 2 * 2 * 1 * 16
    (weight,) = preview(said("zero", "parameters.**"), TAPS)
    assert (weight.elements, weight.as_dict()["kind"]) == (4096, "parameter")
    assert "its next step undoes this" in weight.note
    assert preview(said(pattern="layers.9.**"), TAPS) == []


def test_the_step_agreed_upon_takes_the_place_of_soon() -> None:
    one = said(last=2)
    assert one.first == SOON
    settled = one.settled(40)
    assert [step for step in range(30, 50) if settled.acts(step, 0)] == [40, 41, 42]
    assert settled.settled(99) == settled
    assert said(first=5).last == 5


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.sampled_from(["sign", "exponent", "mantissa"]))
def test_the_fields_of_a_format_are_all_its_bits(dtype: str, field: str) -> None:
    form = FORMATS[dtype]
    assert sorted(bit for name in ("mantissa", "exponent", "sign") for bit in form.field(name)) == list(
        range(form.bits)
    )
    assert form.bits == width(dtype)
    for number, bit in enumerate(form.field(field)):
        name = form.name(bit)
        assert name.startswith(field)
        assert choices([bit], dtype) == [(bit,)]
        if field != "sign":
            assert choices([f"{field}[{number}]"], dtype) == [(bit,)]
    assert choices([field, "random"], dtype) == [tuple(form.field(field)), tuple(range(form.bits))]
    assert bits_problem([f"exponent[{form.exponent}]"], dtype) is not None
    assert bits_problem([form.bits], dtype) is not None


def test_integers_have_bits_but_no_exponent() -> None:
    assert choices([63, "random"], "int64") == [(63,), tuple(range(64))]
    assert bits_problem(["exponent"], "int64") == "int64 has no exponent: it is no floating-point number"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "perturbations is missing"),
        ({"perturbations": []}, "perturbations: 1 to 64, not 0"),
        ({"perturbations": [said().as_dict()], "steps": 101}, "steps: 1 to 100"),
        ({"perturbations": [said(first=5).as_dict()], "steps": 5}, "step 5 is not one of the pair's, 0 to 4"),
        ({"perturbations": [said().as_dict()], "pattern": "a..b"}, "empty segment"),
        ({"perturbations": [{"kind": "zero"}]}, "pattern is missing"),
        ({"perturbations": "zero"}, "perturbations is to be a list"),
    ],
)
def test_pairs_that_make_no_sense_are_refused_in_one_line(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        PairSpec.from_dict(value)
    assert reason in str(caught.value)


def test_a_pair_as_json_both_ways() -> None:
    spec = PairSpec((said(first=1, last=2), said("gaussian")), steps=4, pattern="layers.**", tolerance=0.5, id="q")
    assert PairSpec.from_dict(spec.as_dict()) == spec
