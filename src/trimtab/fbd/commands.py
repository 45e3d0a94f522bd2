"""``trimtab fbd ...``: the command line of forward/backward disaggregation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.output import STDOUT, console, write_text

if TYPE_CHECKING:
    from trimtab.fbd.advise.recorded import Model
    from trimtab.fbd.advise.training import Training

app = typer.Typer(no_args_is_help=True, help="Forward and backward passes on different devices: would it pay?")


@app.callback()
def _group() -> None:
    """Keeps ``advise`` a subcommand, though it is the only one yet."""


@app.command()
def advise(
    layers: Annotated[int, typer.Option(metavar="L", help="Layers of the model.")],
    hidden: Annotated[int, typer.Option(metavar="H", help="Hidden size.")],
    sequence: Annotated[int, typer.Option(metavar="S", help="Tokens of a sequence.")],
    batch: Annotated[int, typer.Option(metavar="B", help="Sequences of a microbatch.")] = 1,
    vocabulary: Annotated[int, typer.Option(metavar="V", help="Of the output layer; 0: it does not count.")] = 0,
    parameters: Annotated[
        float,
        typer.Option(metavar="N", help="Of the whole model: 8e9. Default: 12 h^2 a layer and embeddings."),
    ] = 0.0,
    recompute: Annotated[
        str, typer.Option(metavar="none|selective|full", help="What the job recomputes: sets what forwards save.")
    ] = "selective",
    saved: Annotated[
        float | None, typer.Option(metavar="N", help="Saved a token and layer, in elements of the hidden size.")
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Take times, stages and TP from a recorded run.")
    ] = None,
    forward: Annotated[str | None, typer.Option(metavar="T[,T...]", help="Seconds of each stage's forward.")] = None,
    backward: Annotated[str | None, typer.Option(metavar="T[,T...]", help="Seconds of each stage's backward.")] = None,
    kappa: Annotated[
        float, typer.Option(metavar="K", help="Exposed TP communication of a pass, in units of the forward's compute.")
    ] = 0.0,
    tp: Annotated[int, typer.Option(metavar="T", help="Tensor parallel degree.")] = 1,
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Of a pipeline in a step.")] = None,
    memory: Annotated[str, typer.Option(metavar="BYTES", help="Of a device.")] = "80GB",
    bandwidth: Annotated[str, typer.Option(metavar="BYTES", help="A second, from a device to its partner.")] = "50GB",
    helpers: Annotated[int, typer.Option(metavar="N", help="Forward-only devices for each pipeline.")] = 0,
    helper_speed: Annotated[float, typer.Option(metavar="X", help="Of their forwards; 1: as a trainer's.")] = 0.35,
    helper_memory: Annotated[str, typer.Option(metavar="BYTES", help="Of a helper.")] = "24GB",
    helper_price: Annotated[float, typer.Option(metavar="X", help="Of a helper, in units of a trainer's.")] = 0.0,
    optimizer_bytes: Annotated[float, typer.Option(metavar="N", help="A parameter, where backwards run.")] = 12.0,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write everything there (-: to stdout).")] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Write the plot there (-: to stdout).")] = None,
) -> int:
    """Would forwards and backwards on different devices pay for this job? Predicts throughput per device of ordinary
    training, of less tensor and more pipeline parallelism, and of disaggregation in each mode and ratio; says why."""
    from trimtab.fbd.advise.advice import advise as advice_of
    from trimtab.fbd.advise.recorded import Model
    from trimtab.fbd.advise.report import as_json, show
    from trimtab.fbd.advise.report import svg as plot
    from trimtab.fbd.advise.training import Devices, Helpers

    model = Model(layers, hidden, sequence, batch, vocabulary, parameters, _saved(saved, recompute))
    given = {"--forward": forward, "--backward": backward}
    if from_run is not None:
        training = _recorded(from_run, model, microbatches, given, kappa=kappa, tp=tp)
    else:
        training = _told(model, microbatches, given, kappa=kappa, tp=tp)
    devices = Devices(
        memory=_bytes(memory, "--memory"),
        bandwidth=_bytes(bandwidth, "--bandwidth"),
        optimizer_bytes=optimizer_bytes,
    )
    helping = None
    if helpers:
        helping = Helpers(helpers, helper_speed, _bytes(helper_memory, "--helper-memory"), price=helper_price)
    found = advice_of(training, devices, helping)
    if STDOUT not in (json, svg):
        show(found, console())
    if json is not None:
        from json import dumps

        write_text(json, dumps(as_json(found), indent=2) + "\n")
    if svg is not None:
        write_text(svg, plot(found))
    return 0


def _saved(saved: float | None, recompute: str) -> float:
    from trimtab.fbd.advise.training import SAVED

    if recompute not in SAVED:
        raise ValueError(f"--recompute {recompute}: expected one of {', '.join(SAVED)}")
    return SAVED[recompute] if saved is None else saved


def _told(model: Model, microbatches: int | None, given: dict[str, str | None], *, kappa: float, tp: int) -> Training:
    """From the command line alone."""
    from trimtab.fbd.advise.training import Training

    tables: dict[str, tuple[float, ...]] = {}
    for option, text in given.items():
        if text is None:
            raise ValueError(f"{option} is missing: seconds of each stage, such as 0.1,0.1; or --from a recorded run")
        tables[option] = _seconds(text, option)
    if microbatches is None:
        raise ValueError("--microbatches is missing: how many a pipeline has in a step")
    if kappa < 0:
        raise ValueError(f"--kappa {kappa:g}: not negative")
    exposed = tuple(kappa * seconds for seconds in tables["--forward"])
    rest: dict[str, Any] = {
        "layers": model.layers,
        "hidden": model.hidden,
        "sequence": model.sequence,
        "batch": model.batch,
        "vocabulary": model.vocabulary,
        "parameters": model.parameters,
        "saved": model.saved,
    }
    return Training(tables["--forward"], tables["--backward"], exposed, exposed, tp, microbatches, **rest)


def _recorded(
    directory: Path, model: Model, microbatches: int | None, given: dict[str, str | None], *, kappa: float, tp: int
) -> Training:
    """From a recorded run."""
    from trimtab.fbd.advise.recorded import training_of
    from trimtab.scan.exposure import tensor_parallel_exposure
    from trimtab.scan.pipeline_times import pipeline_times, stages_of
    from trimtab.traces.read import read

    said = [*(option for option, text in given.items() if text is not None)]
    said += [option for option, value, usual in (("--kappa", kappa, 0.0), ("--tp", tp, 1)) if value != usual]
    if said:
        raise ValueError(f"{said[0]} and --from: the run says that itself; leave one of them out")
    trace = read(directory)
    times = pipeline_times(trace)
    for warning in (*trace.warnings, *times.warnings):
        typer.echo(f"trimtab: {warning}", err=True)
    return training_of(
        times, tensor_parallel_exposure(trace, stages_of(trace), times.microbatches), model, microbatches
    )


def _seconds(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text!r}: expected seconds, separated by commas, such as 0.1,0.12") from None


def _bytes(text: str, option: str) -> float:
    from trimtab.pipeline.memory import parse_cap

    try:
        value, has_unit = parse_cap(text)
    except ValueError:
        value, has_unit = 0.0, False
    if not has_unit:
        raise ValueError(f"{option} {text!r}: expected bytes with a unit, such as 80GB")
    return value
