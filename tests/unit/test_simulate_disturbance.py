"""What users write of disturbances: read strictly, told back, refused in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.pipeline.simulate.disturbance import (
    Disturbance,
    Jitter,
    SlowLink,
    SlowStage,
    Tail,
    Transient,
    check,
    describe,
    parse,
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("slow-stage=1.5@2", SlowStage(1.5, 2)),
        ("slow-stage=1.5", SlowStage(1.5, 4)),
        ("link=1.0", SlowLink(1.0, ((3, 4), (4, 3)))),
        ("link=.5@all", SlowLink(0.5)),
        ("link=1@2-3", SlowLink(1.0, ((2, 3), (3, 2)))),
        ("link=1@3>2", SlowLink(1.0, ((3, 2),))),
        ("jitter=0.2", Jitter(0.2)),
        ("tail=0.05x3", Tail(0.05, 3.0)),
        ("transient=link:4@2-3,0.25-0.5", Transient(SlowLink(4.0, ((2, 3), (3, 2))), 0.25, 0.5)),
        ("transient=slow-stage:2@1", Transient(SlowStage(2.0, 1), 0.25, 0.5)),
        ("transient=link:4,1e-1-.5", None),
    ],
)
def test_what_is_written_is_what_is_meant(text, part):
    if part is None:
        with pytest.raises(ValueError, match="transient"):
            parse([text], 8)
        return
    found = parse([text], 8)
    assert found == Disturbance((part,))
    assert parse([describe(part)], 8) == found


def test_several_at_once_in_one_text_or_in_many():
    both = parse(["jitter=0.2 tail=0.05x3"], 4)
    assert both == parse(["jitter=0.2", "tail=0.05x3"], 4)
    assert str(both) == "jitter=0.2 tail=0.05x3"
    assert str(parse([], 4)) == "none"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "unknown kind"),
        ("lnk=1", "did you mean link?"),
        ("xyz=1", "choose from slow-stage, link, jitter, tail, transient"),
        ("link", "no value; expected link=1.0"),
        ("link=", "the transfer time is not a number"),
        ("link=-1", "the transfer time is not a number"),
        ("link=nan", "the transfer time is not a number"),
        ("link=1_0", "the transfer time is not a number"),
        ("link=1e9", "at most 1e"),
        ("link=1@2", "'2' are not two stages"),
        ("link=1@2-2", "no link leads from stage 2 to itself"),
        ("link=1@2-8", "there is no stage 8 of 8"),
        ("slow-stage=0", "the factor must be above 0"),
        ("slow-stage=2@", "'' is not a stage"),
        ("slow-stage=2@-1", "'-1' is not a stage"),
        ("slow-stage=2@8", "there is no stage 8 of 8"),
        ("slow-stage=2@\u0663", "is not a stage"),
        ("jitter=x", "the deviation is not a number"),
        ("tail=0.05", "no factor"),
        ("tail=1.5x3", "the share is above 1"),
        ("tail=0.05x0", "the factor must be above 0"),
        ("transient=jitter:1", "'jitter' cannot be transient"),
        ("transient=link:1,0.5-0.5", "it ends before it begins"),
        ("transient=link:1,0.5", "it is not WHAT,FROM-TO"),
        ("transient=link:1,a-b", "the beginning is not a number"),
    ],
)
def test_nonsense_is_refused_in_one_line_that_shows_the_form(text, said):
    with pytest.raises(ValueError, match="disturbance") as refused:
        parse([text], 8)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_single_stage_has_no_link():
    with pytest.raises(ValueError, match="has no link"):
        parse(["link=1"], 1)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        found = parse([text], 4)
    except ValueError:
        return  # any other error fails
    check(found, 4)
    assert parse([str(found)] if found.parts else [], 4).parts == found.parts
