"""``trimtab scope``: look into a running job and disturb it, by command line. Heavy imports are in the commands."""

from __future__ import annotations

import typer

from trimtab.scope.commands import disturbing, listing, pairing, probing, showing, streaming
from trimtab.scope.commands.generate import generate
from trimtab.scope.commands.open import close_run, open_run
from trimtab.scope.commands.serve import serve

app = typer.Typer(
    name="scope",
    help="See what happens inside a running model, and disturb it.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("serve")(serve)
app.command("open")(open_run)
app.command("close")(close_run)
app.command("generate")(generate)


@app.callback(invoke_without_command=True)
def scope(context: typer.Context) -> None:
    """See what happens inside a running model, and disturb it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("taps")(listing.taps)
app.command("status")(listing.status)
app.command("unsubscribe")(listing.unsubscribe)
app.command("stream")(streaming.stream)
app.command("attention")(streaming.attention)
app.command("perturb")(disturbing.perturb)
app.command("expire")(disturbing.expire)
app.command("revert")(disturbing.revert)
app.command("audit")(disturbing.audit)
app.command("probe")(probing.probe)
app.command("show")(showing.show)
app.command("paired")(pairing.paired)
app.command("compare")(pairing.compare)
