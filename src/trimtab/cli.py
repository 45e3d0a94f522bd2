"""The commands. Each reads its options and calls one function; nothing heavy is imported before it is needed.

Results go to stdout, talk to stderr. Exit codes: 0 done; 2 bad usage or input, told in one line each; 3 something
was found and ``--fail-on finding`` was given; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from trimtab import __version__, config
from trimtab.fbd.commands import app as fbd_app
from trimtab.output import STDOUT, write_text
from trimtab.output import console as _console
from trimtab.output import talk as _talk
from trimtab.pipeline import simulate_command
from trimtab.scope.commands.app import app as scope_app

if TYPE_CHECKING:
    from trimtab.doctor import Check
    from trimtab.traces.table import Trace

EXIT_USAGE: Final = 2
EXIT_FOUND: Final = 3
EXIT_INTERRUPTED: Final = 130

_EXTRAS: Final = {
    "polars": "scan",
    "scipy": "scan",
    "plotly": "scan",
    "perfetto": "scan",
    "google": "scan",
    "msgspec": "scan",
    "isal": "scan",
    "prometheus_client": "scan",
    "starlette": "scope",
    "uvicorn": "scope",
    "websockets": "scope",
    "gguf": "generate",
    "tokenizers": "generate",
    "ray": "ray",
    "torch": "job",
    "pynvml": "job",
    "megatron": "megatron",
}
"""Extra of this package that brings a top-level module."""

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for bad usage; it comes with typer, but under no public name."""

app = typer.Typer(
    name="trimtab",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration, a TOML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; wins over the file. Can be repeated."),
]
RunId = Annotated[
    str | None, typer.Option("--run", metavar="ID", help="Of several runs, this one. Default: the newest.")
]
Attempt = Annotated[
    int | None, typer.Option(metavar="N", help="Of a run that was started again, this attempt. Default: the last.")
]


class EngineName(StrEnum):
    """Where the files of a large run are read."""

    LOCAL = "local"
    RAY = "ray"


class FailOn(StrEnum):
    """What makes a scan exit with 3."""

    FINDING = "finding"


def main() -> None:
    """Entry point of the command: run it, and turn what went wrong into one line and an exit code."""
    result: Any = None
    try:
        result = typer.main.get_command(app).main(standalone_mode=False)
    except _UsageError as error:
        _fail(_usage(error))
    except ValueError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(f"this command needs {error.name}, which is not installed: pip install 'trimtab[{extra}]'")
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except typer.Abort:  # from older typers; newer ones return the exit code
        result = EXIT_INTERRUPTED
    if result == EXIT_INTERRUPTED:
        _talk("trimtab: interrupted")
    if callable(result):  # a user's script: what it raises is its own, so it runs outside of all this
        result()
        return
    sys.exit(result if isinstance(result, int) else 0)


def _usage(error: Exception) -> str:
    """One line with the help to look at; usage errors bring a message of their own and the command's context."""
    message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
    context: Any = getattr(error, "ctx", None)
    if context is None or context.parent is None:
        return message
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return f"{message} (see trimtab {' '.join(names)} --help)"


def _fail(message: str) -> NoReturn:
    for line in message.splitlines():
        _talk(f"trimtab: {line}")
    sys.exit(EXIT_USAGE)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


class _Megatron:
    """The engine of Megatron-Core for trimtab scope generate, see :mod:`trimtab.scope.generate.engine`."""

    def cpu(self) -> Callable[[], None]:
        from trimtab.engines import cpu

        return cpu.install()

    def position(self) -> Any:
        from trimtab.engines.layers import Position

        return Position()

    def points(self, chunk: int, model: Any, position: Any) -> Any:
        from trimtab.engines.megatron_scope import megatron_points

        return megatron_points(chunk, model, position)


@app.callback(invoke_without_command=True)
def trimtab(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """See and steer the training of large models: find the slow rank, say why, and what it costs."""
    del version
    context.obj = _Megatron()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT ...", help="The script, and all its arguments.")],
    config_file: ConfigFile = None,
    settings: Settings = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
) -> Callable[[], None]:
    """Run a training script with trimtab attached (under torchrun: torchrun ... -m trimtab run SCRIPT ...)."""
    from trimtab import launch

    if not module and not Path(script).is_file():
        raise ValueError(f"{script}: no such file; give a script to run, or -m and the name of a module")
    arguments = list(context.args)
    return lambda: launch.run(script, arguments, module=module, config=config_file, settings=tuple(settings or ()))


@app.command()
def scan(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directory of a run's files, or one file; one a node, too.")
    ],
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as JSON (-: to stdout).")] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as one HTML page.")] = None,
    perfetto: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the result in the (first) DIR, where trimtab scope shows it.")
    ] = False,
    run_id: RunId = None,
    attempt: Attempt = None,
    summaries: Annotated[
        bool, typer.Option("--summaries", help="Step times of the whole run, from summaries.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help='The step time that would be: "fix rank 3", "fix stage 1", "link 0-1 at 50 GB/s"; several with '
            '"and", or the option again.',
        ),
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="Where the files of a large run are read.")] = EngineName.LOCAL,
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster. Default: RAY_ADDRESS, or that of this machine.")
    ] = None,
    fail_on: Annotated[FailOn | None, typer.Option(help="Exit with 3 if something was found.")] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> int:
    """Find what slows a recorded job, why, and what it costs."""
    settled = _configuration(config_file, settings)
    from trimtab.scan import analyze
    from trimtab.scan.fold import engines
    from trimtab.scan.fold.load import load
    from trimtab.scan.report import keeping, schema, terminal
    from trimtab.scan.report.html import render as html_page
    from trimtab.scan.whatif import parse

    questions = [parse(text) for text in what_if or ()]
    if save:
        keeping.check(directories[0])
    if summaries:
        with _working(f"reading {directories[0]}"):
            trace = _read(directories, run_id, attempt)
        _show_history(trace)
        return 0
    with _working(f"reading {directories[0]}"):
        reader = engines.Ray(ray_address) if engine is EngineName.RAY else engines.Local()
        trace, folded = load(directories, settled.scan, questions, run_id=run_id, attempt=attempt, engine=reader)
    try:
        with _working(f"scanning {len(trace.events):,} events of {len(trace.ranks)} ranks"):
            analysis = analyze(trace, settled.scan, questions, folded)
    except ValueError:  # no report: what is wrong with the files may be why
        for warning in trace.warnings:
            _talk(f"trimtab: {warning}")
        raise
    report = analysis.report
    if json is not None:
        write_text(json, schema.to_json(report))
    if html is not None:
        write_text(html, html_page(report, analysis.plots))
    if perfetto is not None:
        from trimtab.traces.perfetto import write_perfetto

        write_perfetto(trace, perfetto)
    if save:
        keeping.keep(directories[0], report, analysis.plots)
    if STDOUT not in (json, html):
        terminal.render(report, _console())
    return EXIT_FOUND if fail_on is FailOn.FINDING and report.findings else 0


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run's files, or one file.")],
    target: Annotated[Path, typer.Argument(metavar="FILE", help="Its ending says in which format it is written.")],
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST-LAST", help="Steps to write. Viewers get the slowest ones by default.")
    ] = None,
    run_id: RunId = None,
    attempt: Attempt = None,
) -> None:
    """Write a recorded job for other programs: .perfetto-trace, .json (Chrome, also .json.gz) or .parquet."""
    from trimtab.traces import convert as conversion

    chosen = _step_range(steps) if steps else None
    conversion.writer_for(target)
    trace = _read([source], run_id, attempt)
    written = conversion.write(trace, target, chosen)
    which = "all steps" if written.steps is None else f"steps {written.steps[0]} to {written.steps[1]}"
    _talk(f"{target}: {written.events} events, {which}")


@app.command()
def window(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory into which the job records.")],
    steps: Annotated[int, typer.Option(help="Steps of the window.")] = 3,
    ranks: Annotated[str, typer.Option(metavar="RANKS", help="Ranks that open it: 0, or 0,8-15, or all.")] = "0",
    after: Annotated[
        float, typer.Option(metavar="SECONDS", help="Until it opens: all ranks must have seen the request by then.")
    ] = 15.0,
) -> None:
    """Ask the ranks of a running job for a window of torch.profiler; see [record.window] for planned ones."""
    import time

    from trimtab.events import FILE_SUFFIX
    from trimtab.record.windows.window_files import Request, write_request

    if not any(directory.glob(f"rank*{FILE_SUFFIX}")):
        raise ValueError(f"{directory}: no rank records here; give record.dir of the job, on each node if it is local")
    now = time.time_ns()
    request = Request(now, now + int(max(after, 0.0) * 1e9), steps, ranks)
    _talk(f"{write_request(directory, request)}: {steps} steps of rank {ranks}, from the first in {after:g} s on")


@app.command()
def watch(
    target: Annotated[
        str | None, typer.Argument(metavar="DIR|ADDRESS", help="Directory into which the job records, or its hub.")
    ] = None,
    prometheus: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Serve metrics there; without HOST on this host only.")
    ] = "",
    grafana: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a dashboard for these metrics (-: to stdout), and end.")
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Between pictures, or lines.")] = 0.0,
    json: Annotated[str | None, typer.Option(metavar="-", help="Write lines of JSON to stdout.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Show how it stands once that is known, and end.")] = False,
    window: Annotated[
        bool, typer.Option("--window/--no-window", help="An alarm opens a profiler window on suspect and peers.")
    ] = True,
    patience: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Without progress until the job is said to hang.")
    ] = None,
    fail_on: Annotated[FailOn | None, typer.Option(help="Exit with 3 if something was found.")] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> int:
    """Watch a running job: who is slow, since when, what it costs; and who is missing when it hangs."""
    if grafana is not None:
        import json as encoder

        from trimtab.watch.grafana import dashboard

        write_text(grafana, encoder.dumps(dashboard(), indent=2) + "\n")
        return 0
    if target is None:
        raise ValueError("give record.dir of the job, or host:port of a hub (see trimtab watch --help)")
    if json not in (None, STDOUT):
        raise ValueError(f"--json {json}: lines are written as they come, so give - and redirect stdout")
    settled = _configuration(config_file, settings)
    from trimtab.watch.command import Options
    from trimtab.watch.command import watch as watch_job

    options = Options(
        target, prometheus, max(every, 0.0), json=json is not None, once=once, window=window, patience=patience
    )
    found = watch_job(options, settled, os.environ, _console(), _talk)
    return EXIT_FOUND if fail_on is FailOn.FINDING and found else 0


app.command("simulate")(simulate_command.simulate)
app.add_typer(scope_app, name="scope")
app.add_typer(fbd_app, name="fbd")


@app.command("compile")
def compile_kernels() -> None:
    """Compile what intercepts communication (which jobs do in the background else) and what measures tensors on a CPU
    (which PyTorch does else), once for an installation."""
    from trimtab.record.communication import native
    from trimtab.record.compiled import cache_directory
    from trimtab.scope.device.native import build as build_statistics

    build_statistics()
    cache = cache_directory(os.environ)
    if cache is None or not (native.load(cache) or (native.build(cache) and native.load(cache))):
        raise ValueError(
            "the kernels cannot be compiled here; that takes a C++ compiler (c++, g++ or $CXX), Python's headers and a "
            "cache directory to keep them in ($XDG_CACHE_HOME or ~/.cache); without them communication is intercepted "
            "in Python"
        )
    _talk(f"compiled for this environment, in {cache}")


def _step_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True)):
        raise ValueError(f"--steps {text!r}: expected a step or FIRST-LAST, for example 5-8")
    return int(first), int(last or first)


@app.command()
def demo(
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:KEY=VALUE,...", help="Fault to inject, or none. Default: a rank computes 1.5x slower."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps; the fault begins in the middle.")] = 20,
    layout: Annotated[str | None, typer.Option(metavar="TP2,PP2,DP2", help="Parallel layout.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to train on.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything is written.")] = Path("trimtab-demo"),
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open a browser at the end, and serve it until Ctrl-C.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--serve/--no-serve", help="Leave a server for the browser, which ends when nobody looks.")
    ] = True,
) -> int:
    """Train a small GPT on this machine, slow one rank, and let scan find it."""
    from trimtab import demo as demonstration
    from trimtab import demo_scope

    options = demonstration.Options(out=out, fault=fault, steps=steps, data=data, layout=layout)
    demonstration.check_installed()
    if open_browser:
        demo_scope.check_installed()
    planned = demonstration.plan(options, demonstration.count_gpus(), os.environ)
    demonstration.prepare(out)
    for line in demonstration.introduction(planned):
        _talk(line)
    with demo_scope.recording(out / "run", steps, planned.environment, _talk):
        demonstration.train(planned, out, _talk)
    _talk("Scanning what the ranks recorded.")
    html, perfetto = out / "report.html", out / "trace.perfetto-trace"
    scan([out / "run"], json=str(out / "report.json"), html=str(html), perfetto=perfetto, save=True)
    _talk(f"\nThe report: {html}\nThe trace: {perfetto} (open it in https://ui.perfetto.dev)")
    if open_browser:
        demo_scope.show(out / "run")
    elif page:
        _talk(demo_scope.leave_open(out / "run", out / demo_scope.LOG))
    return 0


@app.command()
def doctor(
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the findings as JSON (-: to stdout).")] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> int:
    """Say what is installed, what trimtab can attach to, and whether a configuration is right (exit 2 if not)."""
    from trimtab import doctor as examination

    diagnosis = examination.examine(config_file, settings or (), os.environ)
    if json is not None:
        import json as encoder

        write_text(json, encoder.dumps(diagnosis.as_dict(), indent=2) + "\n")
    if json != STDOUT:
        _show_checks(diagnosis.checks)
    for problem in diagnosis.problems:
        _talk(f"trimtab: {problem.detail}")
    return EXIT_USAGE if diagnosis.problems else 0


def _show_checks(checks: Sequence[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("ok", "green"), "note": ("-", "yellow"), "problem": ("wrong", "bold red")}
    table = Table.grid(padding=(0, 2))
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            table.add_row(Text(section, "bold"))
        word, style = marks[check.state.value]
        table.add_row(Text(f"  {word}", style), Text(check.name), Text(check.detail, overflow="fold"))
    _console().print(table)


def _working(what: str) -> AbstractContextManager[object]:
    """Tell on a terminal what takes a while; nothing is left of it afterwards."""
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(what))


def _configuration(file: Path | None, settings: list[str] | None) -> config.Config:
    return config.load(file, os.environ, settings or ()).strict()


def _read(paths: Sequence[Path], run_id: str | None, attempt: int | None) -> Trace:
    from trimtab.traces.read import read

    return read(*paths, run_id=run_id, attempt=attempt)


def _show_history(trace: Trace) -> None:
    """Step times as the summaries have them."""
    from trimtab.scan.history import history
    from trimtab.traces.summaries import read_summaries

    if not trace.summaries:
        raise ValueError("no summaries here: a recorder begins to write them after a minute")
    found = read_summaries(trace.summaries)
    for warning in (*trace.warnings, *found.warnings):
        _talk(f"trimtab: {warning}")
    for line in history(found).lines():
        typer.echo(line)
