"""Subscriptions: from words and JSON, and back; what makes no sense is refused with what was expected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scope.commands.wishes import subscription_of
from trimtab.scope.subscription import Subscription, When, numbers, step_range

few = st.one_of(st.none(), st.lists(st.integers(0, 100), min_size=1, max_size=4, unique=True).map(tuple))


@st.composite
def subscriptions(draw: st.DrawFn) -> Subscription:
    what, parameters = draw(
        st.sampled_from(
            [
                ("statistics", {}),
                ("histogram", {"shift": True}),
                ("tiles", {"grid": [8, 16], "reduction": "rms"}),
                ("tiles", {"grid": [8, 16], "reduction": "mean", "dims": ["s", "h"]}),
                ("rows", {"rows": [0, -1]}),
                ("tokens", {"tokens": [3, -1]}),
                ("raw", {"bytes": 100}),
                ("attention", {"grid": [4, 4], "rows": [1, 2], "batch": 1}),
                ("pca", {"components": 2, "tokens": [0]}),
            ]
        )
    )
    first = draw(st.integers(0, 1000))
    last = draw(st.one_of(st.none(), st.integers(first, 2000)))
    when = When(draw(st.integers(1, 50)), first, last, draw(few))
    chosen = {"layers": draw(few), "heads": draw(few), "ranks": draw(few)}
    return Subscription("layers.*.mlp.output", what, when, parameters=parameters, id="s-1", **chosen)


@settings(max_examples=50, deadline=None)
@given(subscriptions())
def test_json_both_ways(one):
    assert not one.problems()
    assert Subscription.from_dict(one.as_dict()) == one


def test_what_is_left_out_is_filled_in():
    assert Subscription.from_dict({"pattern": "logits", "what": "tiles"}).parameters == {
        "grid": [64, 64],
        "reduction": "mean",
    }
    assert Subscription.from_dict({"pattern": "logits"}) == Subscription("logits")


@given(st.integers(1, 7), st.integers(0, 20), st.integers(0, 20), st.integers(0, 60))
def test_moments(every, first, length, step):
    when = When(every, first, first + length, (1,))
    assert when.matches(step, 1) == (step in range(first, first + length + 1, every))
    assert not when.matches(step, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"what": "statistik"}, "what is to be one of .*not 'statistik'; statistics\\?"),
        ({"when": {"every": 0}}, "every is to be a whole number from 1"),
        ({"when": {"first": 5, "last": 4}}, "the last \\(4\\) is before the first \\(5\\)"),
        ({"when": {"microbatches": [-1]}}, "microbatches"),
        ({"layers": []}, "layers: 1 to 4096 numbers"),
        ({"ranks": ["0"]}, "ranks"),
        ({"ranks": [True]}, "ranks"),
        ({"pattern": ""}, "tap: a pattern"),
        ({"what": "tiles", "parameters": {"grid": [64]}}, "grid is to be two numbers"),
        ({"what": "tiles", "parameters": {"grid": [4096, 1]}}, "grid"),
        ({"what": "tiles", "parameters": {"reduction": "max"}}, "absmax"),
        ({"what": "raw", "parameters": {"byte": 3}}, "'byte' is unknown; bytes\\?"),
        ({"what": "raw", "parameters": {"bytes": 1 << 40}}, "bytes is to be a whole number"),
        ({"what": "pca", "parameters": {"components": 99}}, "components"),
        ({"patern": "x"}, "'patern' is unknown"),
        ({"heads": list(range(5000))}, "heads is to be at most 4096"),
    ],
)
def test_nonsense_is_refused_in_one_line(change, says):
    with pytest.raises(ValueError, match=says) as refused:
        Subscription.from_dict({"pattern": "logits"} | change)
    assert "\n" not in str(refused.value)


def test_problems_of_one_that_was_made_in_python():
    wrong = replace(Subscription("logits"), when=When(every=0), ranks=())
    assert [problem.partition(":")[0] for problem in wrong.problems()] == ["every", "ranks"]
    assert "unknown" in Subscription("logits", "entropy").problems()[0]  # type: ignore[arg-type]


def test_words_of_the_command_line():
    found = subscription_of(
        "layers.3.mlp.*",
        every=10,
        steps="100-200",
        microbatches="0",
        layers="0-3",
        heads="0,1",
        ranks="0",
        parameters={"rows": None},
    )
    when = When(10, 100, 200, (0,))
    assert found == Subscription("layers.3.mlp.*", "statistics", when, (0, 1, 2, 3), (0, 1), (0,))
    tiles = subscription_of("logits", "tiles", steps="7-", parameters={"grid": "8x4", "reduction": "absmax"})
    assert tiles.when == When(1, 7, None)
    assert tiles.parameters == {"grid": [8, 4], "reduction": "absmax"}
    assert subscription_of("logits", "tiles", parameters={"dims": "s, v"}).parameters["dims"] == ["s", "v"]
    assert subscription_of("logits", "tokens", parameters={"tokens": "0-2,9"}).parameters == {"tokens": [0, 1, 2, 9]}
    for what, name in (("tokens", "tokens"), ("rows", "rows"), ("pca", "tokens")):  # negative ones from the end
        assert subscription_of("logits", what, parameters={name: "0, -1"}).parameters[name] == [0, -1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"steps": "x"}, "--steps 'x'"),
        ({"steps": "1-2-3"}, "--steps"),
        ({"steps": "-5"}, "--steps"),
        ({"ranks": "0,"}, "--ranks '0,'"),
        ({"layers": "5-3"}, "each range upwards"),
        ({"layers": "0-99999999999"}, "at most 4096 numbers"),
        ({"heads": "²"}, "--heads"),
        ({"heads": "-1"}, "--heads '-1'"),
        ({"what": "tokens", "parameters": {"tokens": "-3--1"}}, "--tokens '-3--1'"),
        ({"what": "tilez"}, "--what.*tiles\\?"),
        ({"what": "tiles", "parameters": {"grid": "64"}}, "--grid '64'"),
        ({"what": "tiles", "parameters": {"dims": "s"}}, "dims are to be two labels"),
        ({"every": 0}, "every"),
    ],
)
def test_words_that_make_no_sense(words, says):
    with pytest.raises(ValueError, match=says):
        subscription_of("logits", **words)


def test_numbers_and_steps():
    assert numbers("3,1, 0-2", "--x") == (3, 1, 0, 2)
    assert step_range("120") == (120, 120)
    assert step_range("5-") == (5, None)
