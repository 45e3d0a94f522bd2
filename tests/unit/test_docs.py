"""The documentation names what exists: settings with their defaults, columns, fields, kinds and commands."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
import typer

from trimtab.cli.entry import EXTRAS, app
from trimtab.config import Config, load
from trimtab.events import FILE_SCHEMA, Kind
from trimtab.record.injection.faults import FaultKind
from trimtab.scan import model

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def section(text, title):
    match = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"no section {title}"
    return match[1]


def rows(text):
    """Cells of each row of the tables in ``text`` whose first cell is code."""
    found = re.findall(r"^\| (`.*?) \|(?: (.*?) )?\|.*$", text, re.MULTILINE)
    return [(re.findall(r"`([^`]*)`", first), second.strip("`")) for first, second in found]


def sections(part, prefix=""):
    """Sections of the configuration by name, those within others as ``record.window``."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield prefix + field.name, value
            yield from sections(value, f"{prefix}{field.name}.")


@pytest.mark.parametrize(("name", "settings"), list(sections(Config())))
def test_every_setting_is_listed_with_its_default(name, settings):
    listed = {names[0]: default for names, default in rows(section(page("reference/configuration.md"), name))}
    expected = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if not dataclasses.is_dataclass(value):
            expected[field.name] = json.dumps(list(value) if isinstance(value, tuple) else value)
    assert listed == expected


def test_documented_configurations_are_valid(tmp_path):
    found = [
        block
        for name in DOCS.rglob("*.md")
        for block in re.findall(r"```toml\n(.*?)```", name.read_text(encoding="utf-8"), re.DOTALL)
    ]
    assert len(found) >= 2
    for block in found:
        file = tmp_path / "t.toml"
        file.write_text(block, encoding="utf-8")
        assert load(file).problems == ()


def test_every_column_is_listed():
    listed = {names[0]: kind for names, kind in rows(section(page("reference/events.md"), "Columns"))}
    assert list(listed) == FILE_SCHEMA.names
    for name, kind in listed.items():
        if kind != "text":
            assert str(FILE_SCHEMA.field(name).type).startswith(kind.split()[0])


def test_every_kind_of_event_is_listed():
    named = [name for names, _ in rows(section(page("reference/events.md"), "Kinds")) for name in names]
    assert sorted(named) == sorted(kind.value for kind in Kind)


def test_every_field_of_the_report_is_listed():
    report, finding = page("reference/report.md").partition("\n## report-plots.json")[0].split("A finding:")
    assert [names[0] for names, _ in rows(report)] == [field.name for field in dataclasses.fields(model.Report)]
    assert [names[0] for names, _ in rows(finding)] == [field.name for field in dataclasses.fields(model.Finding)]
    for part in (model.Job, model.Clock, model.Matching, model.StepTime, model.Windows, model.WhatIf, model.Victim):
        for field in dataclasses.fields(part):
            assert field.name in report


def test_every_verdict_and_finding_is_explained():
    text = page("scan.md")
    assert [names[0] for names, _ in rows(section(text, "Verdicts"))] == [verdict.value for verdict in model.Verdict]
    assert [names[0] for names, _ in rows(section(text, "Findings"))] == [kind.value for kind in model.FindingKind]


def test_every_fault_is_listed():
    listed = [names[0] for names, _ in rows(page("faults.md"))]
    assert sorted(listed) == sorted([*(kind.value for kind in FaultKind), "none"])


def test_every_command_is_listed_and_no_other():
    commands = set(typer.main.get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]
    listed = {
        names[0].split()[1] for names, _ in rows(page("reference/commands.md")) if names[0].startswith("trimtab ")
    }
    assert listed == commands
    for name in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = name.read_text(encoding="utf-8")
        assert set(re.findall(r"`trimtab ([a-z]+)", text)) <= commands | {"doctor"}, name


def test_documented_options_exist():
    known = {"--help", "--nproc-per-node", "--tensor-model-parallel-size", "--pp", "--tp"}
    known |= {"--no-python", "--type"}  # of torchrun and nsys
    known |= {"--export", "--no-deps"}  # of the example and pip
    # of the examples with forwards and backwards apart
    known |= {"--forwards", "--backwards", "--forward-tp", "--mode", "--dropout", "--check"}
    known |= {"--trace", "--trace-dir", "--trace-interval", "--continuous-trace-iterations", "--trace-granularity"}
    commands = list(typer.main.get_command(app).commands.values())  # pyright: ignore[reportAttributeAccessIssue]
    for command in commands:
        commands.extend(getattr(command, "commands", {}).values())  # those below `trimtab scope`
        known |= {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    for name in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", name.read_text(encoding="utf-8")))
        assert used <= known, name


def test_pictures_exist():
    for name in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", name.read_text(encoding="utf-8")):
            assert (name.parent / target).is_file(), f"{name}: {target}"


def test_extras_in_error_messages_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
