"""``generate``: a model is asked for the next token, step by step, and looked into while it answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.output import STDOUT, talk, write_text
from trimtab.scope.commands.common import finite, say
from trimtab.signals import ended_by_signal

if TYPE_CHECKING:
    from trimtab.scope.generate.result import Result


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What the model goes on from.")],
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="smollm2, a GGUF file of a llama, or a folder with a Megatron checkpoint."),
    ] = "smollm2",
    tokens: Annotated[int, typer.Option(metavar="N", help="To generate, at most.")] = 20,
    top: Annotated[int, typer.Option(metavar="K", help="Likeliest tokens that are shown of each step.")] = 5,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is what a user says to an assistant.")] = False,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token; above: drawn.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Drawn of the likeliest tokens that together have it.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    attention: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYERS/HEADS", help="Whom these heads look at: 17/5, 0-3/all. Can be repeated."),
    ] = None,
    hidden: Annotated[bool, typer.Option("--hidden", help="Statistics and components of hidden states.")] = False,
    lens: Annotated[bool, typer.Option("--lens", help="What each layer would say if it were the last.")] = False,
    perturb: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:tap=PATTERN,...",
            help="Disturb it: bit-flip:tap=layers.3.mlp.output,bits=14,steps=2-4. Can be repeated.",
        ),
    ] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write all of it as JSON (-: to stdout).")] = None,
    npz: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all of it as NumPy arrays.")] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record it there, to be replayed as a job would be.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="Of a checkpoint: a tokenizer.json, or bytes.")
    ] = None,
) -> None:
    """Ask a model for the next token, step by step: how likely others were, where it looks, what its layers say."""
    # before torch comes: threads that spin while they wait make a token last ten times as long on a busy machine
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from trimtab.scope.generate.command import Options, run

    options = Options(
        prompt=prompt,
        model=model,
        tokens=tokens,
        top=top,
        chat=chat,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        attention=tuple(attention or ()),
        hidden=hidden,
        lens=lens,
        perturb=tuple(perturb or ()),
        device=device,
        dtype=dtype,
        tokenizer=tokenizer or "",
        record=record,
    )
    shown = None if json == STDOUT else say
    with ended_by_signal():
        result = run(options, context.find_root().obj, shown, talk)
    if result is not None:
        _write(result, json, npz)


def _write(result: Result, json: str | None, npz: Path | None) -> None:
    if json is not None:
        import json as encoder

        said: Any = finite(result.as_dict())
        write_text(json, encoder.dumps(said, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
    if npz is not None:
        from trimtab.scope.generate.export import write_npz

        write_npz(npz, result)
