"""The command ``trimtab simulate``: options, what they mean, and what is printed and written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.output import console

if TYPE_CHECKING:
    from trimtab.pipeline.simulate.perform import Recorded
    from trimtab.pipeline.simulate.request import Loads

Seconds = Annotated[str | None, typer.Option(metavar="T[,T...]", help="Of a stage, or of each. Default: 1.")]
OutFile = Annotated[str | None, typer.Option(metavar="FILE", help="Write it there (-: to stdout).")]


def simulate(
    stages: Annotated[int | None, typer.Option(metavar="P", help="Pipeline stages.")] = None,
    chunks: Annotated[int | None, typer.Option(metavar="V", help="Model chunks a stage. Default: the order's.")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Microbatches of an iteration.")] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="gpipe, 1f1b, interleaved, bfc, dfc, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, or a .csv file of "
            "torch.distributed.pipelining. Default: zb-v, or by --chunks."
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="static, hint, greedy or auto.")] = "hint",
    forward: Seconds = None,
    backward: Seconds = None,
    wgrad: Seconds = None,
    transfer: Annotated[
        float | None, typer.Option(metavar="C", help="A message occupies its link so long, in units of a stage's F.")
    ] = None,
    latency: Annotated[float, typer.Option(metavar="C", help="And arrives so much later.")] = 0.0,
    disturb: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=VALUE",
            help="link=1.0[@2-3|@all], slow-stage=1.5[@2], jitter=0.2, tail=0.05x3, transient=link:4[@2-3][,0.25-0.5]. "
            "Can be repeated.",
        ),
    ] = None,
    cap: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Activations a stage may hold: microbatches (4.5), bytes (12GB) or none. Default: what the order "
            "needs, and for policies that deviate from it one microbatch more.",
        ),
    ] = None,
    activation: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Of one microbatch on a stage, to tell memory in bytes: 1.5GB.")
    ] = None,
    kept: Annotated[float, typer.Option(metavar="SHARE", help="Of them is held from B to W.")] = 1.0,
    sync: Annotated[
        float, typer.Option(metavar="C", help="The gradients of a chunk are reduced in so long, in units of F.")
    ] = 0.0,
    replan: Annotated[
        bool,
        typer.Option("--replan", help="First plan anew for what lasts: slow stages and links (with --compare: auto)."),
    ] = False,
    blocking: Annotated[bool, typer.Option("--blocking", help="Sends keep their stage from computing.")] = False,
    seed: Annotated[int, typer.Option(metavar="S", help="Of jitter and tails.")] = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Rank all orders and policies for this job.")] = False,
    from_run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Take shape and times from a recorded run.")
    ] = None,
    wgrad_share: Annotated[
        float, typer.Option(metavar="SHARE", help="Of a backward pass, where the run did not record W apart.")
    ] = 0.5,
    c_max: Annotated[
        bool | None, typer.Option("--c-max/--no-c-max", help="Look for the largest bearable transfer time.")
    ] = None,
    svg: OutFile = None,
    html: OutFile = None,
    json: OutFile = None,
    csv: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the plan for torch.distributed.pipelining.")
    ] = None,
) -> int:
    """Simulate a pipeline's schedule: how long an iteration takes, what it holds, and a picture of it."""
    from trimtab.pipeline.simulate import perform, request

    loads = request.Loads(stages, chunks, microbatches, forward, backward, wgrad, transfer, latency, kept, activation)
    ask = perform.Ask(
        loads=loads,
        order=order,
        policy=request.policy_named(policy),
        disturb=tuple(disturb or ()),
        cap=cap,
        seed=seed,
        sync=request.positive(sync, "--sync"),
        blocking=blocking,
        c_max=c_max,
        replan=replan,
        recorded=None if from_run is None else recorded(from_run, loads, request.share(wgrad_share, "--wgrad-share")),
    )
    outputs = perform.Outputs(svg, html, json, csv)
    (perform.compare if compare else perform.one)(ask, outputs, console(), lambda text: typer.echo(text, err=True))
    return 0


def recorded(directory: Path, loads: Loads, wgrad_share: float) -> Recorded:
    """The job of a recorded run; microbatches and transfer time may be others than it had."""
    from trimtab.pipeline.simulate.perform import Recorded
    from trimtab.pipeline.simulate.recorded import job_of, refuse
    from trimtab.scan.pipeline_times import pipeline_times
    from trimtab.traces.read import read

    refuse(loads)
    trace = read(directory)
    times = pipeline_times(trace, wgrad_share)
    notes = [*trace.warnings, *times.warnings]
    if not times.split:
        notes.append(f"W was not recorded apart: it is taken to be {wgrad_share:g} of the backward pass")
    return Recorded(job_of(times, loads), times.step, tuple(notes))
