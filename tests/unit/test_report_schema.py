"""report.json keeps its contract: every report validates, every field is described, no number is not a number."""

import dataclasses
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
import sample_reports
from hypothesis import given
from hypothesis import strategies as st

from trimtab.scan import model
from trimtab.scan.report.schema import json_schema, to_json

SAMPLES = [sample_reports.straggler, sample_reports.healthy, sample_reports.inconclusive, sample_reports.hostile]
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def checked(report: model.Report) -> dict[str, Any]:
    written = json.loads(to_json(report), parse_constant=refuse_constant)
    VALIDATOR.validate(written)
    return written


def test_schema_is_itself_valid():
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("sample", SAMPLES)
def test_reports_keep_the_contract(sample):
    written = checked(sample())
    assert written["schema"] == "trimtab.report/1"
    assert written["verdict"] == sample().verdict.value


def test_what_is_unknown_is_null():
    written = checked(sample_reports.inconclusive())
    assert written["slowdown"] is None
    assert written["clock"]["error_us"] == {"p50": None, "max": None}
    assert written["job"]["topology"] is None


def test_numpy_numbers_become_plain_ones():
    report = dataclasses.replace(
        sample_reports.straggler(), slowdown=np.float64(1.5), dropped_events=np.int64(3), missing_ranks=(np.int32(4),)
    )
    written = checked(report)
    assert (written["slowdown"], written["dropped_events"], written["missing_ranks"]) == (1.5, 3, [4])


@given(ratio=st.floats(min_value=0) | st.just(float("nan")), lost=st.floats(), text=st.text())
def test_any_number_and_text_keeps_the_contract(ratio, lost, text):
    finding = sample_reports.finding(ratio=ratio, seconds_lost_per_step=lost, evidence=(text,), host=text)
    checked(dataclasses.replace(sample_reports.straggler(), findings=(finding,), warnings=(text,)))


def test_a_wrong_report_is_refused():
    written = checked(sample_reports.straggler())
    written["findings"][0]["kind"] = "bad_luck"
    with pytest.raises(jsonschema.ValidationError, match="bad_luck"):
        VALIDATOR.validate(written)


@pytest.mark.parametrize(
    ("path", "described"),
    [
        ((), model.Report),
        (("properties", "job"), model.Job),
        (("properties", "clock"), model.Clock),
        (("properties", "matching"), model.Matching),
        (("properties", "matching", "properties", "by"), model.MatchedBy),
        (("properties", "step_time_s"), model.StepTime),
        (("properties", "windows"), model.Windows),
        (("properties", "what_if", "items"), model.WhatIf),
        (("properties", "victims", "items"), model.Victim),
        (("$defs", "finding"), model.Finding),
    ],
)
def test_schema_and_model_have_the_same_fields(path, described):
    part = json_schema()
    for key in path:
        part = part[key]
    fields = [field.name for field in dataclasses.fields(described)]
    assert list(part["properties"]) == fields
    assert part["required"] == fields


def test_schema_and_model_have_the_same_words():
    finding = json_schema()["$defs"]["finding"]["properties"]
    assert finding["kind"]["enum"] == [kind.value for kind in model.FindingKind]
    assert finding["pattern"]["enum"] == [pattern.value for pattern in model.Pattern]
    assert json_schema()["properties"]["verdict"]["enum"] == [verdict.value for verdict in model.Verdict]
