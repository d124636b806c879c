"""Everything that can be known, and refused, before the first collective: corpus, model, tree, planner, steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nestsp.cluster import Cluster, GroupTree
from nestsp.config import RunConfig
from nestsp.data.samples import SampleTable, open_samples
from nestsp.data.store import Progress
from nestsp.data.stream import SampleStream
from nestsp.errors import ConfigError
from nestsp.planners import Planner, check_lengths, make_planner
from nestsp.shape import ModelShape
from nestsp.units import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["Prepared", "prepare", "prepare_data"]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A run whose settings, corpus, model and tree are known to go together.

    Attributes:
        config: The settings.
        samples: The corpus after its policy.
        stream: Its order and batches.
        model: The Transformers config.
        shape: The model's sizes.
        cluster: Hosts and ranks.
        tree: The groups.
        planner: Made from the settings.
        num_steps: Optimizer steps of the whole run.
    """

    config: RunConfig
    samples: SampleTable
    stream: SampleStream
    model: PreTrainedConfig
    shape: ModelShape
    cluster: Cluster
    tree: GroupTree
    planner: Planner
    num_steps: int


def prepare(config: RunConfig, cluster: Cluster, progress: Progress | None = None) -> Prepared:
    """Open or build the token store, and check all that can be checked.

    Args:
        config: The settings.
        cluster: Hosts and ranks of the run.
        progress: Called with (documents done, documents in all or None) while a store is built.

    Raises:
        NestspError: A subclass that names what is wrong.
    """
    from nestsp.model.adapter import model_config, model_shape

    model = model_config(config.model.config)
    shape = model_shape(model)
    samples, tree, planner = prepare_data(config, cluster, shape, progress)
    longest = int(samples.lengths.max())
    limit = getattr(model, "max_position_embeddings", None)
    if isinstance(limit, int) and longest > limit:
        raise ConfigError(
            f"the longest sample has {format_count(longest)} tokens, but model.config.max_position_embeddings is "
            f"{format_count(limit)}; raise it, or set data.max_length"
        )
    stream = SampleStream(
        samples.lengths,
        seed=config.data.seed,
        tokens_per_step=config.data.tokens_per_step,
        sequences_per_step=config.data.sequences_per_step,
    )
    train = config.train
    num_steps = train.steps if train.steps is not None else stream.num_steps(train.epochs or 1)
    return Prepared(config, samples, stream, model, shape, cluster, tree, planner, num_steps)


def prepare_data(
    config: RunConfig, cluster: Cluster, shape: ModelShape, progress: Progress | None = None
) -> tuple[SampleTable, GroupTree, Planner]:
    """The part of `prepare` that needs no torch, so that the launcher can refuse in a second what it finds wrong.

    Raises:
        NestspError: A subclass that names what is wrong.
    """
    tree = cluster.tree(config.cluster.tree)
    make_planner(config.planner, tree, shape, longest=1)  # before the store is built: a typo should not cost minutes
    samples = open_samples(config.data, progress)
    if samples.store.vocab_size > shape.vocab_size:
        raise ConfigError(
            f"model.config.vocab_size is {format_count(shape.vocab_size)}, but the tokenizer "
            f"{config.data.tokenizer!r} has {format_count(samples.store.vocab_size)} tokens; raise it to at least that"
        )
    longest = int(samples.lengths.max())
    # The longest sequence fits: then every sequence does.
    check_lengths(tree, config.planner.max_tokens_per_rank, [int(np.argmax(samples.lengths))], [longest])
    planner = make_planner(config.planner, tree, shape, longest)
    return samples, tree, planner
