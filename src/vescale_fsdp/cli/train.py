"""`vescale-fsdp train`: train a small GPT on real text, fully sharded over ranks that it starts itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from vescale_fsdp.cli.errors import user_errors
from vescale_fsdp.demo.settings import Dtype, EngineName, OptimizerName, Settings

__all__ = ["train"]

DEFAULT_RANKS = 4
RANK_FAILED = 1


def train(
    engine: Annotated[EngineName, typer.Option(help="Who shards: same model, data and seed.")] = EngineName.VESCALE,
    ranks: Annotated[
        int | None, typer.Option(help=f"Processes to start; {DEFAULT_RANKS} unless given. Under torchrun: its own.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = Settings.steps,
    batch: Annotated[int, typer.Option(help="Sequences a step, over all ranks together.")] = Settings.batch,
    seq: Annotated[int, typer.Option(help="Bytes per sequence.")] = Settings.seq,
    layers: Annotated[int, typer.Option(help="Decoder blocks, each wrapped on its own.")] = Settings.layers,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = Settings.dim,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = Settings.heads,
    tied: Annotated[bool, typer.Option("--tied/--untied", help="Whether the head is the embedding.")] = Settings.tied,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = Settings.lr,
    optimizer: Annotated[OptimizerName, typer.Option(help="Who updates the blocks' matrices.")] = Settings.optimizer,
    gather_format: Annotated[
        str | None, typer.Option(metavar="NAME", help="Gather matrices in this block format, such as fp8_block.")
    ] = Settings.gather_format,
    dtype: Annotated[
        Dtype, typer.Option(help="fp32, or bf16: compute in bf16, reduce and update in fp32.")
    ] = Settings.dtype,
    seed: Annotated[int, typer.Option(help="Of initial values, batches and the sample.")] = Settings.seed,
    data: Annotated[Path | None, typer.Option(help="File or folder to learn; else Python's standard library.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for a checkpoint of the last step.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Save after every so many steps, too.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint instead of starting.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for loss.png.")] = Path("out"),
    json: Annotated[Path | None, typer.Option(help="File for the report as data.")] = None,
) -> None:
    """Train a byte-level GPT on real text, fully sharded over ranks that this command starts itself.

    The same flags with another --engine train the same model on the same batches, so that curves can be compared.
    """
    with user_errors():
        from vescale_fsdp.demo.launch import RankError
        from vescale_fsdp.demo.run import Run

        settings = Settings(
            engine=engine,
            ranks=_num_ranks(engine, ranks),
            steps=steps,
            batch=batch,
            seq=seq,
            layers=layers,
            dim=dim,
            heads=heads,
            tied=tied,
            lr=lr,
            optimizer=optimizer,
            gather_format=gather_format,
            dtype=dtype,
            seed=seed,
            data=data,
            checkpoint=checkpoint,
            save_every=save_every,
            resume=resume,
        )
        run = Run(settings, out, json)
        run.check()
    try:
        run.start()
    except RankError as failure:
        typer.echo(f"Error: {failure}", err=True)
        raise typer.Exit(RANK_FAILED) from None


def _num_ranks(engine: EngineName, ranks: int | None) -> int:
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        started = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, started):
            raise ValueError(f"--ranks {ranks}, but torchrun started {started}; leave --ranks out")
        return started
    if engine is EngineName.SINGLE and (ranks is None or ranks > 1):
        if ranks is not None:
            typer.echo(f"Note: --engine single is one process; --ranks {ranks} is not used.", err=True)
        return 1
    return DEFAULT_RANKS if ranks is None else ranks
