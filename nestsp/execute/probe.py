"""The probe: a small copy of a model, run as nestsp would run it, against each sequence alone by Transformers.

It runs before the first step, on the CPU, in seconds, in one process: the copy keeps every kind of layer of the model
(`nestsp.model.shrink`), ranks are threads (`nestsp.comm.threads`), and all else is the code that trains: plans,
executor, attention, recomputation, sliced likelihoods. Compared are the logits, the loss and every gradient, in float64
throughout (`nestsp.execute.float64`), so that rounding leaves 1e-14 and nothing hides in it. What differs is refused,
so traps that nobody listed are found too.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from nestsp.attention.kernels import CpuFlash
from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.comm.groups import Link
from nestsp.comm.threads import run_as_threads
from nestsp.errors import ModelError
from nestsp.execute.capability import ring_refusal
from nestsp.execute.executor import Executor
from nestsp.execute.float64 import all_float64
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.execute.verify import Gradients, compare_gradients, reference_gradients
from nestsp.model.adapter import build_model
from nestsp.model.derive import attention_calls, model_shape, reference_attention
from nestsp.model.logits import logit_function
from nestsp.model.root import LossRoot
from nestsp.model.shrink import PROBE_VOCABULARY, shrink_config
from nestsp.plan import Keep, Plan
from nestsp.shape import ModelShape
from nestsp.shard import rank_spans
from nestsp.units import plural

__all__ = ["KINDS", "Kind", "Probe", "Subject", "make_subject", "probe_kind", "probe_line", "probe_model"]

Kind = Literal["local", "ulysses", "ring", "hybrid"]
KINDS: tuple[Kind, ...] = ("local", "ulysses", "ring", "hybrid")

# The groups of each kind: a tree, and the ring's members.
_GROUPS: Mapping[Kind, tuple[tuple[int, ...], int]] = {
    "local": ((), 1),
    "ulysses": ((3,), 1),
    "ring": ((3,), 3),
    "hybrid": ((4,), 2),
}
# Longer and shorter than the small copy's window, than the number of ranks, and one without a target.
_LENGTHS = (13, 6, 2, 1)
_SLICE_TOKENS = 5
_CPU = torch.device("cpu")

# Rounding leaves about 1e-14; anything structural is above 1e-6.
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe of a model gave.

    Attributes:
        num_layers: Of the small copy.
        errors: Largest error of logits, loss and gradients, by kind of group.
        refusals: The sentence by which a kind of group is refused.
    """

    num_layers: int
    errors: Mapping[Kind, float]
    refusals: Mapping[Kind, str]

    @property
    def error(self) -> float:
        """The largest of all."""
        return max(self.errors.values())


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A small copy, and what it gives when each sequence is alone.

    Attributes:
        name: Of the model's class.
        model: With nestsp's attention.
        shape: Of the copy.
        sequences: Token ids.
        logits: Of each sequence alone.
        reference: Loss and gradients of each sequence alone.
    """

    name: str
    model: PreTrainedModel
    shape: ModelShape
    sequences: Mapping[int, Tensor]
    logits: Mapping[int, Tensor]
    reference: Gradients


def probe_model(config: PreTrainedConfig, kinds: Sequence[Kind] = KINDS) -> Probe:
    """Probe a model in groups of some kinds.

    Args:
        config: A config that `nestsp.model.adapter.model_config` accepted.
        kinds: Of the groups; a kind that the model cannot have is reported, not raised.

    Raises:
        ModelError: The model cannot be shrunk, asks for what is not done, or gives something else than alone.
    """
    subject = make_subject(config)
    errors: dict[Kind, float] = {}
    refusals: dict[Kind, str] = {}
    refusal = ring_refusal(model_shape(config))
    for kind in kinds:
        if kind in ("ring", "hybrid") and refusal is not None:
            refusals[kind] = refusal
        else:
            errors[kind] = probe_kind(subject, kind)
    return Probe(subject.shape.num_layers, errors, refusals)


def probe_line(config: PreTrainedConfig) -> str:
    """Probe a model before it is trained, in the two kinds of groups that have all the others in them; for people.

    Raises:
        ModelError: See `probe_model`.
    """
    start = time.perf_counter()
    probe = probe_model(config, ("local", "ulysses" if ring_refusal(model_shape(config)) else "hybrid"))
    seconds = time.perf_counter() - start
    return (
        f"{plural(probe.num_layers, 'layer')} of the model made small, {' and '.join(probe.errors)}: logits, "
        f"loss and gradients equal each sequence alone ({probe.error:.0e}); {seconds:.1f} s"
    )


def make_subject(config: PreTrainedConfig) -> Subject:
    """Build the small copy and run its sequences alone.

    Raises:
        ModelError: See `probe_model`.
    """
    name = f"{config.model_type} model"
    try:
        small = shrink_config(config)
        shape = model_shape(small)
        options = {"experts_implementation": "eager"} if shape.num_moe_layers else {}
        model = build_model(small, seed=0, **options).double()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"the {name} cannot be made small for the probe ({type(error).__name__}: {' '.join(str(error).split())}), "
            "but no model is trained without it; take another one, or report this config"
        ) from None
    _amplify(model)
    calls = attention_calls(model)
    wanted = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    for call in calls:
        found = (call.num_heads, call.num_kv_heads, call.head_dim)
        if (
            found != wanted
            or (call.window or shape.window) != shape.window
            or call.sinks != shape.sinks
            or (call.softcap or 0.0) != shape.softcap
        ):
            raise ModelError(
                f"layer {call.layer} of the {name} asks for attention of {call}, but its sizes say {shape}; report this"
            )
    if sum(call.window is not None for call in calls) != shape.num_window_layers:
        raise ModelError(
            f"{sum(call.window is not None for call in calls)} layers of the {name} ask for a window, but its config "
            f"says {shape.num_window_layers}; correct model.config.layer_types"
        )
    generator = torch.Generator().manual_seed(1)
    sequences = {i: torch.randint(PROBE_VOCABULARY, (n,), generator=generator) for i, n in enumerate(_LENGTHS)}
    alone = copy.deepcopy(model)
    alone.set_attn_implementation(reference_attention(shape))
    with all_float64():
        with torch.no_grad():
            logits = {i: alone(input_ids=ids[None], use_cache=False).logits[0] for i, ids in sequences.items()}
        reference = reference_gradients(alone, sequences)
    return Subject(name, model, shape, sequences, logits, reference)


def probe_kind(subject: Subject, kind: Kind) -> float:
    """Run the small copy in a group of some kind, with one token at least on another path: recomputed and kept.

    Returns:
        The largest error of logits, loss and gradients.

    Raises:
        ModelError: Something differs from each sequence alone.
    """
    fanouts, ring_degree = _GROUPS[kind]
    tree = GroupTree(fanouts)
    worst = 0.0
    for keep, num_kept_layers in (("none", 0), ("output", 1)):
        plan = _plan(tree, ring_degree, keep, num_kept_layers)  # type: ignore[arg-type]
        plan.check()
        results = run_as_threads(tree, lambda rank, links, plan=plan: _run(subject, plan, rank, links))  # type: ignore[misc]
        gradients = [result[0] for result in results]
        for which, error in (
            ("logits", max(_distance(logits, subject.logits) for _, logits in results)),
            ("loss and gradients", compare_gradients(_sum(gradients), subject.reference, sum(_LENGTHS)).worst),
        ):
            if not error <= _TOLERANCE:
                raise ModelError(
                    f"the {subject.name} gives other {which} in a {kind} group than each sequence alone (error "
                    f"{error:.1e}, but at most {_TOLERANCE:.0e} is rounding), so it mixes tokens outside "
                    "attention or has a step that nestsp does not know; use another model"
                )
            worst = max(worst, error)
    return worst


def _plan(tree: GroupTree, ring_degree: int, keep: Keep, num_kept_layers: int) -> Plan:
    batch = SequenceBatch.of_lengths(_LENGTHS)
    plan = Plan.of_groups(tree, batch, [{tree.group(0, 0): range(len(_LENGTHS))}], "probe", keep=keep)
    (microbatch,) = plan.microbatches
    (placement,) = microbatch.placements
    placed = (replace(placement, ring_degree=ring_degree),)
    return replace(plan, microbatches=(replace(microbatch, placements=placed, num_kept_layers=num_kept_layers),))


def _run(
    subject: Subject, plan: Plan, rank: int, links: Mapping[int, Link]
) -> tuple[Gradients, Mapping[tuple[int, int], Tensor]]:
    """One rank: its gradients, and the logits of its tokens by sequence and position."""
    model = copy.deepcopy(subject.model)
    install_layer_runner(model)
    executor = Executor(
        LossRoot(model, _SLICE_TOKENS), subject.shape, links, rank, _CPU, CpuFlash(), AttentionTimer(_CPU)
    )
    executor.check(plan)

    def read(identity: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        tokens: npt.NDArray[np.int64] = subject.sequences[identity][start:stop].numpy()
        return tokens

    batch = executor.load(plan, read)
    (microbatch,) = batch.microbatches
    tokens = microbatch.tokens
    with all_float64():  # of this thread
        loss = executor.run(batch)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with all_float64(), torch.no_grad():
        hidden = model.base_model(
            input_ids=tokens.ids[None],
            position_ids=tokens.positions[None],
            use_cache=False,
            return_dict=True,
            nestsp=microbatch.attention,
        ).last_hidden_state[0]
        logits = logit_function(model)(hidden)
    held = [(span.sequence, p) for span in rank_spans(plan, rank)[0].spans for p in range(span.start, span.stop)]
    return Gradients(loss.item(), gradients, {}), dict(zip(held, logits, strict=False))


def _sum(parts: Sequence[Gradients]) -> Gradients:
    total: dict[str, Tensor | None] = {}
    for name in parts[0].by_parameter:
        found = [gradient for part in parts if (gradient := part.by_parameter[name]) is not None]
        total[name] = torch.stack(found).sum(0) if found else None
    return Gradients(sum(part.loss_sum for part in parts), total, {})


def _distance(found: Mapping[tuple[int, int], Tensor], wanted: Mapping[int, Tensor]) -> float:
    """Largest difference of any logit, over the largest logit."""
    scale = max(float(logits.abs().max()) for logits in wanted.values())
    differences = [float((row - wanted[sequence][place]).abs().max()) for (sequence, place), row in found.items()]
    return max(differences, default=0.0) / scale


def _amplify(model: PreTrainedModel) -> None:
    """The usual initial weights are so small that errors in attention would hardly show."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.15)
