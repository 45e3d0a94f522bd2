"""Names of taps: patterns, order, refusals, JSON."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scope.names import Pattern, Tap, choose, closest, order, summarise

NAMES = [
    "embedding.output",
    *(
        f"layers.{layer}.{part}{ending}"
        for layer in range(12)
        for part in ("input", "attention.q", "attention.core", "mlp.hidden", "mlp.output", "output")
        for ending in ("", ".grad")
    ),
    "final_norm.output",
    "logits",
    "parameters.decoder.layers.0.mlp.linear_fc1.weight",
    "parameters.decoder.layers.0.mlp.linear_fc1.weight.grad",
]


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("layers.3.mlp.*", "layers.3.mlp.output", True),
        ("layers.3.mlp.*", "layers.3.mlp.output.grad", False),
        ("layers.3.**", "layers.3.mlp.output.grad", True),
        ("layers.3.**", "layers.3", True),
        ("**", "logits", True),
        ("**.output", "layers.3.mlp.output", True),
        ("**.output", "logits.outputs", False),
        ("layers.0-3.mlp.output", "layers.3.mlp.output", True),
        ("layers.0-3.mlp.output", "layers.4.mlp.output", False),
        ("layers.[2-10].output", "layers.10.output", True),
        ("layers.[10].output", "layers.10.output", True),
        ("layers.{0-1,7}.output", "layers.7.output", True),
        ("layers.{0-1,7}.output", "layers.2.output", False),
        ("layers.1.{attention.{q,k},mlp.output}", "layers.1.attention.k", True),
        ("layers.1.{attention.{q,k},mlp.output}", "layers.1.attention.v", False),
        ("layers.1.att*.*", "layers.1.attention.v", True),
        ("layers.*.m*p.*d*n", "layers.4.mlp.hidden", True),
        ("*a*a", "a", False),
        ("**.5.**.2", "x.5.y.5.z.2", True),
        ("optimizer.**.0-3.*", "optimizer.h.7.w.2.exp_avg", True),
    ],
)
def test_a_pattern_means(pattern: str, name: str, matches: bool) -> None:
    assert Pattern(pattern).matches(name) is matches


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", "characters"),
        ("x" * 600, "characters"),
        ("layers .0", "white space"),
        ("layers..output", "empty segment"),
        ("layers.{0,1.output", "braces"),
        ("layers.0}.output", "braces"),
        ("layers.9-3.output", "ends before it begins"),
        ("layers.[a-c].output", "no range"),
        ("{a,b}" * 20, "alternatives"),
    ],
)
def test_what_is_no_pattern_is_refused_in_a_line(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        Pattern(pattern)
    assert "\n" not in str(refusal.value)


def test_many_stars_take_no_time() -> None:
    assert not Pattern(".".join(["**", "a"] * 60)).matches(".".join(["a"] * 59 + ["b"]))
    assert not Pattern("*a" * 200 + "*b").matches("a" * 2000)


def test_a_pattern_that_means_nothing_is_refused_with_the_closest_names() -> None:
    with pytest.raises(ValueError, match=re.escape("no tap matches 'layers.3.mlp.outptu'")) as refusal:
        choose("layers.3.mlp.outptu", NAMES)
    assert "close to it: layers.0-11.mlp.output," in str(refusal.value)
    assert closest("layers.12.attention.q", NAMES)[0] == "layers.0-11.attention.q"
    with pytest.raises(ValueError, match="there are none"):
        choose("logits", [])


def test_what_is_chosen_comes_in_the_order_of_the_model() -> None:
    assert choose("layers.{10,9}.**", reversed(NAMES))[:6] == [
        "layers.9.input",
        "layers.9.input.grad",
        "layers.9.attention.q",
        "layers.9.attention.q.grad",
        "layers.9.attention.core",
        "layers.9.attention.core.grad",
    ]
    assert sorted(set(NAMES), key=order) == NAMES


def test_a_summary_means_all_that_it_sums_up() -> None:
    lines = summarise(NAMES)
    assert len(lines) == 17
    assert "layers.0-11.mlp.hidden.grad" in lines
    assert {name for line in lines for name in choose(line, NAMES)} == set(NAMES)


segments = st.text("ab1", min_size=1, max_size=3)
names = st.lists(segments, min_size=1, max_size=5).map(".".join)
patterns = st.lists(st.sampled_from(["a", "b1", "*", "**", "a*", "*1", "{a,1}"]), min_size=1, max_size=4).map(".".join)


@settings(max_examples=150)
@given(patterns, names)
def test_patterns_are_as_the_regular_expressions_that_they_stand_for(pattern: str, name: str) -> None:
    segments = [
        {"**": "(?:%[^.]+)*", "{a,1}": "%(?:a|1)"}.get(part, "%" + part.replace("*", "[^.]*"))
        for part in pattern.split(".")
    ]
    regular = "".join(segments).replace("%", r"\.")
    assert Pattern(pattern).matches(name) == bool(re.fullmatch(regular, "." + name))


numbers = st.integers(0, 10**6)
taps = st.builds(
    Tap,
    name=names,
    kind=st.sampled_from(["activation", "gradient", "parameter", "optimizer", "attention", "communication"]),
    labels=st.lists(st.sampled_from("sbhd")).map(tuple),
    shape=st.none() | st.lists(numbers, max_size=4).map(tuple),
    dtype=st.sampled_from(["", "bfloat16"]),
    shard=st.lists(st.tuples(st.sampled_from(["tp", "dp"]), numbers, numbers), max_size=3).map(tuple),
    replica=numbers,
    layer=st.integers(-1, 100),
    heads=st.none() | st.tuples(numbers, numbers, numbers),
    module=st.sampled_from(["", "decoder.layers.0"]),
    chunk=numbers,
    part=st.none() | st.tuples(numbers, numbers),
)


@settings(max_examples=50)
@given(taps)
def test_a_tap_survives_json(tap: Tap) -> None:
    assert Tap.from_json(json.loads(json.dumps(tap.to_json()))) == tap


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": 3},
        {"kind": "secret"},
        {"shape": "abc"},
        {"shape": [1.5]},
        {"heads": [1, 2]},
        {"part": [1]},
        {"shard": [["tp", 1]]},
        {"shard": [["tp", True, 2]]},
        {"labels": [1]},
        {"replica": None},
    ],
)
def test_what_is_no_tap_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="tap"):
        Tap.from_json({"name": "logits", "kind": "activation"} | change)
    with pytest.raises(ValueError, match="JSON object"):
        Tap.from_json([])
