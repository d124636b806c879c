"""``nestsp``: train, verify, plan, config.

The same command is the launcher, when a person calls it, and one rank, when torchrun or the launcher does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from nestsp import __version__
from nestsp.config import RunConfig, describe_settings, load_config
from nestsp.errors import ConfigError, NestspError

__all__ = ["main"]

# A rank that leaves the word to another one stays so long: did it leave first, torchrun might end the speaker before it
# has spoken.
_SILENCE_S = 30.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain lines: help is also read in logs and pipes
    help="Train Hugging Face language models on long-tailed, variable-length data by nested sequence parallelism.",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run; see `nestsp config`.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, such as train.steps=20. May be repeated."),
]


@app.command()
def train(
    config: ConfigPath,
    set_: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH",
            help="Go on from a checkpoint: of the latest run of this name (auto), of a run's folder, or that one. "
            "Without it, every start is a new run in a new folder.",
        ),
    ] = None,
) -> None:
    """Train a model.

    Starts cluster.ranks ranks on this machine. For several machines, or your own launcher, start the same command as
    ranks of torchrun:

    \b
      torchrun --nproc-per-node 4 -m nestsp train CONFIG
    """  # noqa: D301  (click leaves lines after a backspace as they are)
    settings = load_config(config, set_ or ())
    if _is_rank():
        from nestsp.train.launch import run_rank
        from nestsp.train.trainer import train as train_rank

        run_rank(lambda: train_rank(settings, resume))
    _launch(settings)


@app.command(short_help="Compare one planned step with one process.")
def verify(
    config: ConfigPath,
    set_: Overrides = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="NUMBER", help="Largest batch that is compared, in tokens.")
    ] = 8192,
) -> None:
    """Compare one planned step with one process: loss and every gradient, in float64.

    Run it before you trust a new model. Takes the run's own model, corpus, tree and planner, on the CPU. Exits with 1
    if anything differs by more than rounding.
    """
    settings = load_config(config, set_ or ())
    if max_tokens < 2:
        raise ConfigError(f"--max-tokens is {max_tokens}, but a batch with a target has at least 2 tokens; raise it")
    if _is_rank():
        from nestsp.train.launch import run_rank
        from nestsp.train.verify import verify as verify_rank

        run_rank(lambda: verify_rank(settings, max_tokens))
    _launch(settings)


@app.command()
def plan(
    lengths: Annotated[
        str,
        typer.Argument(
            metavar="LENGTHS", help="A .jsonl, .npy, .npz or .csv file of lengths, or wikipedia, github or arxiv."
        ),
    ],
    cluster: Annotated[str, typer.Option(help="Hosts x ranks of each, and their hardware, such as 8x8:h100.")],
    model: Annotated[str, typer.Option(help="A model's name, such as qwen3-30b-a3b, or the path of a config.json.")],
    planner: Annotated[
        str, typer.Option(help="all, batch-adaptive, basp, disjoint, flexsp (slow, not part of all) or nsp.")
    ] = "all",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the batch; a file without it is one batch.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Drop longer sequences.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn from a built-in corpus.")] = 0,
    memory: Annotated[float | None, typer.Option(min=0, help="GiB that a rank may use.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the best plan's timeline as a Chrome trace.")] = None,
) -> None:
    """Show what each planner makes of one batch, without a GPU: time, memory, and what sits where."""
    from nestsp.cli.plan import plan_lengths
    from nestsp.data.lengths import LENGTH_TABLES

    plan_lengths(
        lengths,
        cluster=cluster,
        model=model,
        planner=planner,
        max_tokens=2_000_000 if max_tokens is None and lengths in LENGTH_TABLES else max_tokens,
        max_length=max_length,
        seed=seed,
        memory_gib=memory,
        as_json=as_json,
        trace=trace,
    )


@app.command(name="config")
def show_config() -> None:
    """Print all settings with their types, defaults and meanings."""
    import textwrap

    for key, kind, default, meaning in describe_settings():
        if not kind:
            print(f"\n# {meaning}\n{key}:")
            continue
        indent = "  " * key.count(".")
        for line in textwrap.wrap(meaning, 100):
            print(f"{indent}# {line}")
        print(
            f"{indent}{key.rpartition('.')[2]}: {default}  # {kind}"
            if default != "required"
            else f"{indent}{key.rpartition('.')[2]}:  # {kind}, required"
        )


def _version(wanted: bool) -> None:
    if wanted:
        print(f"nestsp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; what a user can mend is said in one sentence, with exit code 2."""
    try:
        app()
    except NestspError as error:
        # Ranks of one host all read the same settings; one of them says what is wrong with them.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"nestsp: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            time.sleep(_SILENCE_S)
        sys.exit(2)


def _is_rank() -> bool:
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def _launch(settings: RunConfig) -> None:
    """Start the ranks of this command on this machine, and leave with their exit code."""
    # What needs no torch is refused, and the store built, before any rank waits for it.
    from nestsp.cluster import Cluster
    from nestsp.shape import ModelShape, read_config_json
    from nestsp.train.console import Screen
    from nestsp.train.prepare import prepare_data

    source = settings.model.config
    shape = ModelShape.from_hf_config(read_config_json(Path(source)) if isinstance(source, str) else source)
    num_ranks = settings.cluster.ranks
    if num_ranks is None:
        from nestsp.train.world import default_num_ranks

        num_ranks = default_num_ranks(settings.cluster)
    with Screen().progress("tokenising", None) as bar:
        prepare_data(settings, Cluster(1, num_ranks), shape, bar.set)

    from nestsp.train.launch import launch_ranks

    sys.exit(launch_ranks(sys.argv[1:], num_ranks))
