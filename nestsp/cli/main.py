"""``nestsp``: train, verify, export, plan, simulate, trace, config.

The same command is the launcher, when a person calls it, and one rank, when torchrun or the launcher does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nestsp import __version__
from nestsp.cli.options import PlanningOptions, with_planning_options
from nestsp.errors import ConfigError, NestspError

if TYPE_CHECKING:
    from nestsp.config import RunConfig

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
    settings = _settings(config, set_)
    if _is_rank():
        _let_segments_grow()
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
    settings = _settings(config, set_)
    if max_tokens < 2:
        raise ConfigError(f"--max-tokens is {max_tokens}, but a batch with a target has at least 2 tokens; raise it")
    if _is_rank():
        from nestsp.train.launch import run_rank
        from nestsp.train.verify import verify as verify_rank

        run_rank(lambda: verify_rank(settings, max_tokens))
    _launch(settings)


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's folder, or a run's, whose latest is taken.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where to; an earlier export there is replaced.")],
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16", help="Of the exported numbers.")] = "float32",
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A tokenizer's folder, whose files are copied along.")
    ] = None,
) -> None:
    """Write a checkpoint's model in Hugging Face format. Needs neither its run nor a GPU."""
    from nestsp.cli.export import export_checkpoint

    export_checkpoint(checkpoint, out, dtype, tokenizer)


@app.command()
@with_planning_options
def plan(
    lengths: Annotated[
        str,
        typer.Argument(
            metavar="LENGTHS",
            help="A .jsonl, .npy, .npz, .csv or .parquet file of lengths or texts; a folder of text; stdlib; or a "
            "built-in table: wikipedia, github, arxiv.",
        ),
    ],
    cluster: Annotated[
        str, typer.Option(metavar="HOSTSxRANKS:HARDWARE", help="Ranks are of each host; such as 8x8:h100.")
    ],
    model: Annotated[
        str,
        typer.Option(metavar="NAME|PATH", help="A model's name, such as qwen3-30b-a3b, or the path of a config.json."),
    ],
    options: PlanningOptions,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Of the batch, unless its first sequence alone has more; by default 2,000,000 of a table, else all "
            "there is.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best plan's timeline, for Perfetto or Chrome.")
    ] = None,
) -> None:
    """Show what each planner makes of one batch.

    Its time and memory, estimated, and what sits where. Needs no GPU.
    """
    from nestsp.cli.plan import plan_lengths

    plan_lengths(
        lengths, cluster=cluster, model=model, options=options, max_tokens=max_tokens, as_json=as_json, trace=trace
    )


@app.command()
@with_planning_options
def simulate(
    lengths: Annotated[
        list[str], typer.Argument(metavar="LENGTHS", help="As of `nestsp plan`; several give several cells.")
    ],
    cluster: Annotated[
        list[str], typer.Option(metavar="HOSTSxRANKS:HARDWARE", help="As of `nestsp plan`; may be repeated.")
    ],
    model: Annotated[list[str], typer.Option(metavar="NAME|PATH", help="As of `nestsp plan`; may be repeated.")],
    options: PlanningOptions,
    batches: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Batches of each cell.")] = 20,
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Of each batch, unless its first sequence alone has more.")
    ] = 2_000_000,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also with 20 % more and less computation and bandwidth.")
    ] = False,
    scale: Annotated[
        str | None,
        typer.Option(metavar="HOSTS,...", help="Also on so many hosts, with as many tokens for each rank."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead.")] = False,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the speed-ups, as .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Compare planners over many batches.

    Speed-ups over the best static degree and over the best degree of each batch, estimated, with their spread. Needs no
    GPU.
    """
    from nestsp.cli.simulate import simulate_cells

    simulate_cells(
        lengths,
        clusters=cluster,
        models=model,
        num_batches=batches,
        options=options,
        max_tokens=max_tokens,
        sensitivity=sensitivity,
        scale=scale,
        as_json=as_json,
        as_markdown=as_markdown,
        chart=chart,
    )


@app.command(short_help="Write one step's measured and estimated timeline.")
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that had train.trace_steps set.")],
    step: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="The step; by default the first traced one.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What to write; by default RUN/trace/step-NUMBER.json.")
    ] = None,
) -> None:
    """Write one step's timeline, measured and estimated side by side, for Perfetto or Chrome."""
    from nestsp.cli.trace import trace_run

    trace_run(run, step=step, out=out)


@app.command(short_help="Probe a model: is it trained right, and in which kinds of groups?")
def check(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="The path of a config.json or its folder, or a name such as gemma-2-9b."),
    ],
) -> None:
    """Probe a model: is it trained right, and in which kinds of groups?

    Makes a small copy with every kind of layer that the model has, and compares it with each sequence alone, in float64
    on the CPU, in seconds. `nestsp train` does so itself before the first step. Exits with 2 if the model is refused.
    """
    from nestsp.cli.check import check_model

    check_model(model)


@app.command(name="config")
def show_config() -> None:
    """Print all settings with their types, defaults and meanings."""
    import textwrap

    from nestsp.config import describe_settings

    for key, kind, default, meaning in describe_settings():
        if not kind:
            print(f"\n# {meaning}\n{key}:")
            continue
        indent = "  " * key.count(".")
        for line in textwrap.wrap(meaning, 100, break_on_hyphens=False):
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


def _settings(config: Path, overrides: list[str] | None) -> RunConfig:
    """A run's settings; a file that they name for planning is read once now, not after hours of tokenising."""
    from nestsp.config import load_config

    settings = load_config(config, overrides or ())
    if settings.cluster.profile is not None:
        from nestsp.cost.profile import load_profile

        load_profile(settings.cluster.profile)
    return settings


def _let_segments_grow() -> None:
    """Keep a GPU's memory whole though every step has other lengths; PyTorch reads this once, when it is imported.

    The word of whoever starts the ranks counts, in either of the two variables that PyTorch knows.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _launch(settings: RunConfig) -> None:
    """Start the ranks of this command on this machine, and leave with their exit code."""
    # What needs no torch is refused, and the store built, before any rank waits for it.
    from nestsp.cluster import Cluster
    from nestsp.shape import FAMILIES, ModelShape, read_config_json
    from nestsp.train.console import Screen
    from nestsp.train.prepare import prepare_data

    source = settings.model.source
    keys = read_config_json(Path(source)) if isinstance(source, str) else source
    if keys.get("model_type") in FAMILIES:
        shape = ModelShape.from_hf_config(keys)
    else:  # another family's sizes are found in the model itself
        from nestsp.model.adapter import model_config
        from nestsp.model.derive import model_shape

        shape = model_shape(model_config(source))
    num_ranks = settings.cluster.ranks
    if num_ranks is None:
        from nestsp.train.world import default_num_ranks

        num_ranks = default_num_ranks(settings.cluster)
    with Screen().progress("tokenising", None, lines=True) as bar:
        prepare_data(settings, Cluster(1, num_ranks), shape, bar.set)

    from nestsp.train.launch import launch_ranks

    sys.exit(launch_ranks(sys.argv[1:], num_ranks))
