"""The options of `fxpipe plan`, with what its help says of them."""

from pathlib import Path
from typing import Annotated

import typer

OWNERS = ("round_robin", "slack", "balanced")

File = Annotated[
    Path | None,
    typer.Argument(
        exists=True, dir_okay=False, help="Text of a cut or a table, or torch's CSV of actions."
    ),
]
Region = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=ROLE:F[,B[,W]]",
        help="Seconds of one microbatch, of the whole region for an encoder or a generator, of one "
        "rank's share for the backbone. F: frozen. F,B: the backward is one op. Repeatable.",
    ),
]
Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks of the pipeline.")]
Microbatches = Annotated[int, typer.Option(min=1, help="Microbatches per step.")]
Schedule = Annotated[str, typer.Option(help="PLACEMENT/BASE, or auto, which shows its choices.")]
Chunks = Annotated[int | None, typer.Option(min=1, help="Backbone stages per rank.")]
Shard = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="An encoder or generator cut over the ranks. Repeatable."),
]
Scale = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=X,X,...", help="Factors of a region's seconds per microbatch. Repeatable."
    ),
]
OwnerMap = Annotated[
    str | None,
    typer.Option(metavar="MAP", help=f"{', '.join(OWNERS)}, or a rank per microbatch: 0,1,2,..."),
]
ModalityLive = Annotated[
    int | None, typer.Option(min=1, help="Most units of encoders and generators on a rank.")
]
LlmLive = Annotated[int | None, typer.Option(min=1, help="Most backbone units on a rank.")]
Latency = Annotated[float, typer.Option(min=0, help="Seconds of each transfer.")]
Bandwidth = Annotated[float, typer.Option(min=0, help="Bytes per second between two ranks.")]
Bytes = Annotated[
    list[str] | None,
    typer.Option(
        "--bytes",
        metavar="NAME=N",
        help="Bytes that a region sends per microbatch, both ways. Repeatable.",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N",
        help="Bytes kept for the backward of a microbatch, shared as seconds are. Repeatable.",
    ),
]
Memory = Annotated[float | None, typer.Option(min=0, help="Bytes per rank for auto.")]
Recompute = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A region whose backward computes the forward again; auto may add more. Repeatable.",
    ),
]
Effort = Annotated[
    float, typer.Option(min=0.0, help="How long to look for a schedule; 1 is a second or two.")
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Verify and simulate the table in FILE. Its cut's costs, such as flops, stand for "
        "seconds where no --region says them.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
