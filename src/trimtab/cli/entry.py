"""The commands. Each reads its options and calls one function; nothing heavy is imported before it is needed.

Results go to stdout, talk to stderr. Exit codes: 0 done; 2 bad usage or input, told in one line each; 3 something
was found and ``--fail-on finding`` was given; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final, NoReturn

import typer

from trimtab import __version__
from trimtab.cli.demo import demo
from trimtab.cli.installation import compile_kernels, doctor
from trimtab.cli.megatron import Megatron
from trimtab.cli.options import EXIT_INTERRUPTED, EXIT_USAGE
from trimtab.cli.recorded import convert, scan
from trimtab.cli.running import run, watch, window
from trimtab.fbd.commands import app as fbd_app
from trimtab.output import talk
from trimtab.pipeline import simulate_command
from trimtab.scope.commands.app import app as scope_app

EXTRAS: Final = {
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
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(f"this command needs {error.name}, which is not installed: pip install 'trimtab[{extra}]'")
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except typer.Abort:  # from older typers; newer ones return the exit code
        result = EXIT_INTERRUPTED
    if result == EXIT_INTERRUPTED:
        talk("trimtab: interrupted")
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
        talk(f"trimtab: {line}")
    sys.exit(EXIT_USAGE)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def trimtab(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """See and steer the training of large models: find the slow rank, say why, and what it costs."""
    del version
    context.obj = Megatron()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False, "allow_interspersed_args": False}
)(run)
for _command in (scan, convert, window, watch, demo, doctor, simulate_command.simulate):
    app.command()(_command)
app.command("compile")(compile_kernels)
app.add_typer(scope_app, name="scope")
app.add_typer(fbd_app, name="fbd")
