"""Configuration: three sources, and every mistake named in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config import Config, RecordConfig, load


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_default() -> None:
    assert load().strict() == Config()


def test_the_later_source_wins(tmp_path: Path) -> None:
    file = write(tmp_path, '[record]\ndir = "file"\nevery_steps = 2\nfor_steps = 3\n[emulate]\nenabled = true\n')
    environment = {"TRIMTAB_RECORD_EVERY_STEPS": "5", "TRIMTAB_RECORD_DIR": "environment", "OTHER": "x"}
    config = load(file, environment, ["record.dir=argument"]).strict()
    assert (config.record.dir, config.record.every_steps, config.record.for_steps) == ("argument", 5, 3)
    assert config.emulate.enabled


def test_a_base_is_where_defaults_come_from() -> None:
    base = Config(record=RecordConfig(dir="mine", every_steps=4))
    config = load(arguments=["record.every_steps=7"], base=base).strict()
    assert (config.record.dir, config.record.every_steps) == ("mine", 7)


def test_types_are_converted(tmp_path: Path) -> None:
    file = write(tmp_path, "[record]\nflush_seconds = 2\n[emulate]\nlayer_forward_ms = 3\n")
    config = load(
        file,
        {
            "TRIMTAB_EMULATE_ENABLED": "Yes",
            "TRIMTAB_FAULTS_INJECT": "slow_compute:rank=3,factor=2;gc_pause:rank=1",
        },
        ["scan.min_share=0.02", "record.enabled=off"],
    ).strict()
    assert config.record.flush_seconds == 2.0
    assert isinstance(config.record.flush_seconds, float)
    assert config.emulate.enabled
    assert not config.record.enabled
    assert config.scan.min_share == 0.02
    assert config.faults.inject == ("slow_compute:rank=3,factor=2", "gc_pause:rank=1")


def test_faults_as_arguments_are_taken_whole_and_add_up() -> None:
    arguments = ["faults.inject=slow_compute:rank=3,factor=1.5", "faults.inject=slow_link:ranks=0+1,ms=5"]
    assert load(arguments=arguments).strict().faults.inject == (
        "slow_compute:rank=3,factor=1.5",
        "slow_link:ranks=0+1,ms=5",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[record]\nevry_steps = 1", r"record\.evry_steps is not a setting \(did you mean 'every_steps'\?\)"),
        ("[recorder]\ndir = 'x'", r"unknown section \[recorder\] \(did you mean 'record'\?\)"),
        ("record = 3", r"\[record\] must be a table"),
        ("[record]\nevery_steps = 1.5", "expected int"),
        ("[record]\nevery_steps = true", "expected int"),
        ("[record]\nevery_steps = -1", "must be a finite number, and not negative"),
        ("[record]\nflush_seconds = nan", "must be a finite number, and not negative"),
        ("[emulate]\nlayer_forward_ms = inf", "must be a finite number, and not negative"),
        ("[record]\nflush_seconds = 1e300", "must be at most 3600"),
        ("[record]\nring_events = 99999999999999", "must be at most"),
        ("[scan]\nconfidence = 99", "must be at most 1"),
        ("[scan]\nmin_share = 5", "must be at most 1"),
        ("[record]\nflush_seconds = 'soon'", "expected float"),
        ("[record]\nenabled = 'maybe'", "expected true or false"),
        ("[record]\ngranularity = 'kernel'", "choose from step, layer, op"),
        ("[record\n", "not valid TOML"),
    ],
)
def test_each_mistake_is_one_line_and_the_rest_is_used(tmp_path: Path, text: str, problem: str) -> None:
    loaded = load(write(tmp_path, text), {"TRIMTAB_RECORD_RUN_ID": "good"})
    (line,) = loaded.problems
    assert "\n" not in line
    assert str(tmp_path / "t.toml") in line
    with pytest.raises(ValueError, match=problem):
        loaded.strict()
    assert loaded.config == Config(record=RecordConfig(run_id="good"))


def test_a_missing_file_and_a_malformed_argument_are_named(tmp_path: Path) -> None:
    loaded = load(tmp_path / "none.toml", {}, ["record.dir", "dir=x", "record.every_steps="])
    assert [line.partition(":")[0] for line in loaded.problems] == [str(tmp_path / "none.toml")] + ["arguments"] * 3
    assert loaded.config == Config()


@given(
    st.dictionaries(
        st.sampled_from(["record", "scan", "nonsense"]),
        st.dictionaries(st.sampled_from(["dir", "enabled", "min_share", "bad"]), st.text() | st.integers() | st.none()),
    )
)
def test_arguments_never_raise(tree: dict[str, dict[str, Any]]) -> None:
    arguments = [f"{section}.{key}={value}" for section, values in tree.items() for key, value in values.items()]
    loaded = load(arguments=arguments)
    assert isinstance(loaded.config, Config)
    known = {"record": {"dir", "enabled"}, "scan": {"min_share"}}
    unknown_keys = sum(1 for s, values in tree.items() if s in known for key in values if key not in known[s])
    assert len(loaded.problems) >= unknown_keys


def test_a_misspelt_environment_variable_is_named() -> None:
    loaded = load(environment={"TRIMTAB_RECORD_DIRR": "x", "TRIMTAB_RECORD_DIR": "y", "HOME": "/"})
    assert loaded.config.record.dir == "y"
    assert len(loaded.problems) == 1
    assert "TRIMTAB_RECORD_DIRR" in loaded.problems[0]
    assert "TRIMTAB_RECORD_DIR'" in loaded.problems[0]
