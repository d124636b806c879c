"""Everything that can be known, and refused, before the first collective: corpus, model, tree, planner, steps.

What the devices decide (`nestsp.train.limits`) comes after it; then `planning_task` says what is to be planned, and
proves that every sequence fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.config import RunConfig
from nestsp.cost.memory import MemoryOptions
from nestsp.data.samples import SampleTable, open_samples
from nestsp.data.store import Progress, TokenStore
from nestsp.data.stream import DataState, SampleStream
from nestsp.errors import ConfigError, InfeasibleError
from nestsp.execute.capability import executor_capabilities
from nestsp.planners import check_planner
from nestsp.planners.limits import check_cap
from nestsp.planners.task import PlanningTask
from nestsp.shape import ModelShape
from nestsp.units import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["Prepared", "check_vocabulary", "planning_task", "prepare", "prepare_data", "router_loss_coefficient"]

# Batches over which a static planner without a degree chooses one.
_BATCHES_SAMPLED = 20


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
        num_steps: Optimizer steps of the whole run.
    """

    config: RunConfig
    samples: SampleTable
    stream: SampleStream
    model: PreTrainedConfig
    shape: ModelShape
    cluster: Cluster
    tree: GroupTree
    num_steps: int

    @property
    def longest(self) -> SequenceBatch:
        """The run's longest sequence, alone."""
        return _longest(self.samples)


def prepare(config: RunConfig, cluster: Cluster, progress: Progress | None = None) -> Prepared:
    """Open or build the token store, and check all that can be checked.

    Args:
        config: The settings.
        cluster: Hosts and ranks of the run.
        progress: Called with (documents done, documents in all or None) while a store is built.

    Raises:
        NestspError: A subclass that names what is wrong.
    """
    from nestsp.model.adapter import model_config
    from nestsp.model.derive import model_shape
    from nestsp.model.mini_sequence import check_mlp_slices

    model = model_config(config.model.source)
    shape = model_shape(model)
    if config.train.mlp_slice_tokens is not None:
        check_mlp_slices(model)
    samples, tree = prepare_data(config, cluster, shape, progress)
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
        shares=samples.shares,
        together=config.data.samples_together,
    )
    train = config.train
    num_steps = train.steps if train.steps is not None else stream.num_steps(train.epochs or 1)
    return Prepared(config, samples, stream, model, shape, cluster, tree, num_steps)


def prepare_data(
    config: RunConfig, cluster: Cluster, shape: ModelShape, progress: Progress | None = None
) -> tuple[SampleTable, GroupTree]:
    """The part of `prepare` that needs no torch, so that the launcher can refuse in a second what it finds wrong.

    Raises:
        NestspError: A subclass that names what is wrong.
    """
    tree = cluster.tree(config.cluster.tree)
    planner = config.planner
    if planner.attention in ("ring", "hybrid") and shape.window:
        raise ConfigError(
            f"planner.attention is {planner.attention}, but the model has layers with a sliding window of "
            f"{format_count(shape.window)}, which no ring runs; set it to auto or ulysses"
        )
    if config.train.router_loss != "off" and not shape.num_moe_layers:
        raise ConfigError(
            f"train.router_loss is {config.train.router_loss}, but the {shape.family} model has no experts; set it to "
            "off"
        )
    config.train.num_shards(cluster.num_ranks, cluster.ranks_per_host)
    check_planner(planner.name, planner.degree, tree)  # before the store is built: a typo should not cost minutes
    samples = open_samples(config.data, progress)
    for store in samples.stores:
        check_vocabulary(store, shape)
        _check_preference(store, config)
    forms = sorted({store.meta["form"] for store in samples.stores})
    if "preference" in forms and len(forms) > 1:
        raise ConfigError(
            f"data.mixture has rows of the forms {', '.join(forms)}, but a loss that compares answers would compare "
            "what does not belong together; mix pairs with pairs alone"
        )
    if planner.max_tokens_per_rank is not None:  # the longest sequence keeps it: then every sequence does
        longest = _longest(samples)
        check_cap(tree, planner.max_tokens_per_rank, longest.ids, longest.lengths)
        _check_degree(planner.degree, planner.max_tokens_per_rank, longest.lengths[0])
    return samples, tree


def planning_task(
    prepared: Prepared, *, profile: str, memory_per_rank_bytes: int, element_bytes: int, device: str = "cpu"
) -> PlanningTask:
    """What the run asks of its planner, known to be possible for every sequence of the store.

    A static planner without a degree gets one here: the one that is estimated fastest over the run's first batches,
    which the run's seed has drawn.

    Args:
        prepared: The run.
        profile: Name of a preset, or path of a profile.
        memory_per_rank_bytes: Hard limit of each rank.
        element_bytes: Of one number in computation.
        device: ``cpu`` or ``cuda``; on a CPU, offloading saves nothing.

    Raises:
        InfeasibleError: The model or the longest sequence does not fit.
        ConfigError: The profile is not there, or damaged.
    """
    planner, train, cluster = prepared.config.planner, prepared.config.train, prepared.cluster
    task = PlanningTask(
        planner=planner.name,
        degree=planner.degree,
        max_tokens_per_rank=planner.max_tokens_per_rank,
        shape=prepared.shape,
        cluster=cluster,
        tree=prepared.tree,
        profile=profile,
        memory_per_rank_bytes=memory_per_rank_bytes,
        can=executor_capabilities(prepared.shape, recompute=train.recompute),
        loss_slice_tokens=train.loss_slice_tokens,
        element_bytes=element_bytes,
        memory=MemoryOptions(
            num_shards=train.num_shards(cluster.num_ranks, cluster.ranks_per_host),
            mlp_slice_tokens=train.mlp_slice_tokens,
            num_trained=_num_trained(prepared),
            offloads_inputs=train.offload and device == "cuda",
        ),
        streaming=planner.streaming,
        attention=planner.attention,
    )
    task.check_longest(prepared.longest)
    if planner.name != "static" or planner.degree is not None:
        return task
    batches, state = [], DataState()
    for _ in range(_BATCHES_SAMPLED):
        batch, state = prepared.stream.take(state)
        batches.append(batch)
    return task.with_degree(batches, prepared.longest)


def _num_trained(prepared: Prepared) -> int | None:
    """Parameters of the adapters; None if all are trained."""
    settings = prepared.config.train.lora
    if settings is None:
        return None
    from nestsp.model.load import empty_model
    from nestsp.model.lora import add_adapters, num_adapter_parameters

    model = empty_model(prepared.model)
    add_adapters(model, settings)
    return num_adapter_parameters(model)


def router_loss_coefficient(prepared: Prepared) -> float:
    """Factor of the routers' auxiliary loss.

    Raises:
        ConfigError: Neither the settings nor the model's config have one.
    """
    given = prepared.config.train.router_loss_coefficient
    value = getattr(prepared.model, "router_aux_loss_coef", None) if given is None else given
    if value is None:
        raise ConfigError(
            "train.router_loss_coefficient is not set and the model's config has no router_aux_loss_coef, but the "
            "auxiliary loss needs a factor; set one of them"
        )
    return float(value)


def check_vocabulary(store: TokenStore, shape: ModelShape) -> None:
    """Every token of a store is one of the model's.

    Raises:
        ConfigError: The model has fewer.
    """
    if store.vocab_size <= shape.vocab_size:
        return
    tokenizer, size = store.meta["tokenizer"], format_count(store.vocab_size)
    if tokenizer is None:
        what = f"{store.meta['source']} has tokens up to {format_count(store.vocab_size - 1)}; raise it to {size}"
    else:
        what = f"the tokenizer {tokenizer!r} has {size} tokens; raise it to at least that"
    raise ConfigError(f"model.config.vocab_size is {format_count(shape.vocab_size)}, but {what}")


def _check_preference(store: TokenStore, config: RunConfig) -> None:
    """Pairs stay together, and go to a loss that knows of them.

    Raises:
        ConfigError: They do not.
    """
    if store.meta["form"] != "preference":
        return
    what = f"{store.meta['source']} has rows of a chosen and a rejected answer, which are two samples each"
    if config.data.samples_together % 2:
        raise ConfigError(f"{what}, but data.samples_together is {config.data.samples_together}; set it to 2")
    if config.train.sequence_loss is None:
        raise ConfigError(
            f"{what}, but without train.sequence_loss the rejected ones would be taught, too; set it (docs/losses.md)"
        )


def _longest(samples: SampleTable) -> SequenceBatch:
    number = int(np.argmax(samples.lengths))
    return SequenceBatch((number,), (int(samples.lengths[number]),))


def _check_degree(degree: int | None, max_tokens_per_rank: int, longest: int) -> None:
    if degree is not None and -(-longest // degree) > max_tokens_per_rank:
        raise InfeasibleError(
            f"the longest sequence has {format_count(longest)} tokens and needs {format_count(-(-longest // degree))} "
            f"on each of planner.degree = {degree} ranks, but planner.max_tokens_per_rank is "
            f"{format_count(max_tokens_per_rank)}; raise one of them, or set data.max_length"
        )
