"""Runs plans on gloo ranks in float64 and compares loss and every gradient with one process, each sequence alone.

One call of `compare_with_one_process` runs several cases. Besides the numbers it records what every rank did: each
exchange in its order and each call of a kernel, and holds both against the schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from graphlib import CycleError, TopologicalSorter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn import functional as F

from nestsp.attention import ring, ulysses
from nestsp.attention.kernels import CpuFlash
from nestsp.attention.local import Kernel, Mask
from nestsp.attention.place import Place
from nestsp.comm.exchange import Exchange, Shape, start_exchange, start_pass
from nestsp.comm.groups import Link, make_links
from nestsp.execute.executor import Executor, LocalBatch
from nestsp.execute.float64 import all_float64
from nestsp.execute.measure import AttentionTimer
from nestsp.execute.recompute import install_layer_runner
from nestsp.execute.verify import (
    Gradients,
    RoutingRecorder,
    Verification,
    compare_gradients,
    full_gradients,
    reference_gradients,
)
from nestsp.model.adapter import build_model, decoder_layers, model_config
from nestsp.model.compiled import install_compiler
from nestsp.model.derive import model_shape, reference_attention
from nestsp.model.mini_sequence import install_mlp_slices
from nestsp.model.root import LossRoot
from nestsp.model.router_loss import RouterLoss
from nestsp.plan import Placement, Plan
from nestsp.schedule import Pass, Schedule, make_schedule, num_exchanges
from nestsp.shape import ModelShape, head_shares, head_slices
from nestsp.shard import rank_spans
from nestsp.train.parallelize import make_mesh, shard_root

# Rounding in float64 leaves about 1e-14; anything structural is above 1e-6. In between lie only the models' float32
# parts (norms, the router's softmax): a value that falls on the other side of a float32 rounding moves results by 1e-8.
TOLERANCE = 1e-9
CPU = torch.device("cpu")

LLAMA = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3}
QWEN3 = {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
QWEN2 = {"model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 2}
MIXTRAL = {
    "model_type": "mixtral",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MISTRAL = {"model_type": "mistral", "num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": 4}
GEMMA2 = {
    "model_type": "gemma2",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {"model_type": "gemma3_text", "num_attention_heads": 6, "num_key_value_heads": 2, "sliding_window": 5}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "sliding_window": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
PHI3 = {"model_type": "phi3", "num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 0}
GRANITE = {
    "model_type": "granite",
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
}
COHERE = {"model_type": "cohere", "num_attention_heads": 6, "num_key_value_heads": 2, "use_qk_norm": True}
OLMO2 = {"model_type": "olmo2", "num_attention_heads": 6, "num_key_value_heads": 3}
COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "vocab_size": 67,
}


@dataclass(frozen=True)
class Case:
    """A plan on a model.

    Attributes:
        keys: Of the model's config, beyond `COMMON`.
        plan: As JSON.
        recompute: Layers are recomputed, but for those that the plan keeps; otherwise all are kept.
        slice_tokens: Tokens of one slice of the loss.
        trainable: If given, only parameters whose names contain one of these texts are trained.
        weighted: Targets have weights of all signs and sizes, instead of 1.
        streaming: Groups take turns.
        mlp_slice_tokens: Tokens of one slice of a feed-forward block; None for all.
        offload: Inputs of recomputed layers go through `save_on_cpu`.
        compiler: Backend that compiles the layers' blocks; None for none.
    """

    keys: Mapping[str, Any]
    plan: Mapping[str, Any]
    recompute: bool = True
    slice_tokens: int = 5
    trainable: tuple[str, ...] | None = None
    weighted: bool = False
    streaming: bool = True
    mlp_slice_tokens: int | None = None
    offload: bool = False
    compiler: str | None = None

    @property
    def made(self) -> Plan:
        """The plan."""
        plan, layers = Plan.from_json(self.plan), small_config(self.keys)["num_hidden_layers"]
        if self.recompute:
            return plan
        return replace(plan, microbatches=tuple(replace(m, num_kept_layers=layers) for m in plan.microbatches))


@dataclass(frozen=True)
class Outcome:
    """What a case gave.

    Attributes:
        verification: Against one process.
        faults: What the ranks did that the schedule does not say, as sentences.
    """

    verification: Verification
    faults: tuple[str, ...]


def small_config(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {**COMMON, **keys}


def make_model(
    keys: Mapping[str, Any],
    attention: str,
    *,
    trainable: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float64,
) -> nn.Module:
    config = model_config(small_config(keys))
    experts = ("qwen3_moe", "mixtral", "gpt_oss")
    more = {"experts_implementation": "eager"} if keys["model_type"] in experts else {}
    model: nn.Module = build_model(config, seed=3, attention=attention, **more)
    model = model.double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # the usual initial weights are so small that errors in attention would hardly show
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.15)
            parameter.requires_grad_(trainable is None or any(text in name for text in trainable))
    return model.to(dtype)


def make_tokens(plan: Plan, vocabulary: int = COMMON["vocab_size"], changed: int | None = None) -> dict[int, Tensor]:
    """Random tokens of each sequence, a function of its id and length alone; other ones for a changed sequence."""
    tokens = {}
    for identity, length in zip(plan.batch.ids, plan.batch.lengths, strict=True):
        generator = torch.Generator().manual_seed(1000 + identity + (500 if identity == changed else 0))
        tokens[identity] = torch.randint(0, vocabulary, (length,), generator=generator)
    return tokens


def make_weights(plan: Plan) -> dict[int, Tensor]:
    """A weight for each token's target: zeros, negative and large ones among them. float32."""
    weights = {}
    for identity, length in zip(plan.batch.ids, plan.batch.lengths, strict=True):
        generator = torch.Generator().manual_seed(2000 + identity)
        weights[identity] = torch.randn(length, generator=generator) * 3
        weights[identity][::3] = 0
    return weights


class CountingKernel:
    """PyTorch's CPU kernel, counting its calls."""

    def __init__(self, inner: Kernel | None = None) -> None:
        self.name = "counting"
        self.calls: Counter[str] = Counter()
        self.inner = inner or CpuFlash()

    def adapted(self, window: int | None, softcap: float | None) -> CountingKernel:
        kernel = CountingKernel(self.inner.adapted(window, softcap))
        kernel.calls = self.calls
        return kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        self._count("forward", q, k, v, mask)
        return self.inner.forward(q, k, v, mask, scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._count("backward", q, k, v, mask)
        return self.inner.backward(dout, q, k, v, out, lse, mask, scale)

    def _count(self, call: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
        assert min(*q.shape, *k.shape) > 0
        assert min(*mask.queries.lengths, *mask.keys.lengths) > 0
        assert (sum(mask.queries.lengths), sum(mask.keys.lengths), len(k)) == (len(q), len(k), len(v))
        self.calls[call] += 1


GATHER = ROOT = -1


@dataclass
class Log:
    """What one rank did.

    Attributes:
        issued: What attention and FSDP issued, in order: groups as (level, first rank), for each exchange; and
            (GATHER, layer), or (GATHER, ROOT), for each gather of parameters.
        sent_bytes: To other ranks, for each exchange.
        kernel: Calls of the kernel.
    """

    issued: list[tuple[int, int]] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    kernel: Counter[str] = field(default_factory=Counter)

    @property
    def exchanges(self) -> list[tuple[int, int]]:
        """What attention issued."""
        return [event for event in self.issued if event[0] != GATHER]


@contextmanager
def recorded(executor: Executor, plan: Plan) -> Iterator[Log]:
    """Record what this rank does."""
    names = {}
    for level, link in executor.links.items():
        group = plan.tree.group(level, executor.rank)
        names[id(link)] = (level, group.first_rank)
    layers = {id(part): n for n, layer in enumerate(decoder_layers(executor.root)) for part in layer.modules()}
    log = Log()
    assert isinstance(executor.kernel, CountingKernel)
    executor.kernel.calls = log.kernel
    gather_unit = vars(_fsdp_param_group)["foreach_all_gather"]

    def start(
        link: Link, sent: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int], shapes: Sequence[Shape]
    ) -> Exchange:
        level, first = names[id(link)]
        log.issued.append((level, first))
        log.sent_bytes.append((sum(in_sizes) - in_sizes[executor.rank - first]) * sent.element_size())
        return start_exchange(link, sent, in_sizes, out_sizes, shapes)

    def send(link: Link, target: int, tensors: Sequence[Tensor], source: int, shapes: Sequence[Shape]) -> Exchange:
        log.issued.append(names[id(link)])
        log.sent_bytes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return start_pass(link, target, tensors, source, shapes)

    def gather(parameters: Any, *args: Any) -> Any:
        log.issued.append((GATHER, layers.get(id(parameters[0]._module_info.module), ROOT)))
        return gather_unit(parameters, *args)

    # and back: the process serves other tests after this one
    with (
        patch.object(ulysses, "start_exchange", start),
        patch.object(ring, "start_pass", send),
        patch.object(_fsdp_param_group, "foreach_all_gather", gather),
    ):
        yield log


def make_executor(
    case: Case,
    rank: int,
    *,
    links: Mapping[int, Link] | None = None,
    compute_dtype: torch.dtype = torch.float64,
    reduce_dtype: torch.dtype = torch.float64,
    sharded: bool = True,
    num_shards: int | None = None,
    router_loss: str = "off",
) -> Executor:
    tree = case.made.tree
    shape = model_shape(model_config(small_config(case.keys)))
    model = make_model(case.keys, "nestsp", trainable=case.trainable, dtype=reduce_dtype)
    if case.compiler is not None:
        install_compiler(model, case.compiler)
    if case.mlp_slice_tokens is not None:
        install_mlp_slices(model, case.mlp_slice_tokens)
    install_layer_runner(model, offload=case.offload)
    root = LossRoot(
        model,  # type: ignore[arg-type]
        case.slice_tokens,
        None if router_loss == "off" else RouterLoss(model),
        keeps_router_counts=router_loss == "previous_step",
    )
    if sharded:
        mesh = make_mesh("cpu", tree.num_ranks, num_shards or tree.num_ranks)
        shard_root(root, mesh, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    if links is None:
        links = make_tree_links(case.made, rank)
    return Executor(root, shape, links, rank, CPU, CountingKernel(), AttentionTimer(CPU), case.streaming)


def make_tree_links(plan: Plan, rank: int) -> Mapping[int, Link]:
    ranks = plan.tree.num_ranks
    return make_links(plan.tree, rank, CPU, ranks_per_host=ranks, timeout=timedelta(seconds=30))


def reader(tokens: Mapping[int, Tensor]) -> Callable[[int, int, int], np.ndarray[Any, np.dtype[np.int64]]]:
    def read(identity: int, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return tokens[identity][start:stop].numpy()

    return read


def origins(plan: Plan, rank: int) -> list[list[tuple[int, int]]]:
    """(sequence id, position) of each token that a rank holds, for each microbatch."""
    return [
        [(plan.batch.ids[s.sequence], p) for s in spans.spans for p in range(s.start, s.stop)]
        for spans in rank_spans(plan, rank)
    ]


def load(executor: Executor, plan: Plan, tokens: Mapping[int, Tensor], *, weighted: bool = False) -> LocalBatch:
    plan.check()
    executor.check(plan)
    local = executor.load(plan, reader(tokens))
    if weighted:
        weights = make_weights(plan)
        for microbatch, origin in zip(local.microbatches, origins(plan, executor.rank), strict=True):
            for row, (identity, position) in enumerate(origin):
                microbatch.tokens.weights[row] = weights[identity][position]
    return local


def planned_gradients(
    executor: Executor, plan: Plan, tokens: Mapping[int, Tensor], *, weighted: bool = False
) -> Gradients:
    local = load(executor, plan, tokens, weighted=weighted)
    recorder = RoutingRecorder(executor.root)
    total = torch.zeros((), dtype=torch.float64)
    for microbatch, origin in zip(local.microbatches, origins(plan, executor.rank), strict=True):
        with recorder.tokens(origin):
            total += executor.run(LocalBatch((microbatch,)))
    recorder.remove()
    dist.all_reduce(total)
    choices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(choices, recorder.choices)
    merged = {key: value for part in choices for key, value in part.items()}
    return Gradients(total.item(), full_gradients(executor.root, keep=executor.rank == 0), merged)


def weighted_gradients(model: nn.Module, tokens: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> Gradients:
    """Σ weight × negative log-likelihood in one process, each sequence alone; says nothing of experts."""
    total = torch.zeros((), dtype=torch.float64)
    for identity, ids in tokens.items():
        if len(ids) > 1:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            picked = F.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]
            total = total - (picked * weights[identity][:-1].double()).sum()
    if total.requires_grad:
        total.backward()
    return Gradients(total.item(), {name: p.grad for name, p in model.named_parameters()}, {})


def compare_with_one_process(rank: int, num_ranks: int, cases: Sequence[Case]) -> list[Outcome]:
    """Run cases of one number of ranks; results on rank 0.

    Cases of one model run on one and the same model in turn, as plans do in training, and share what one process gives.
    """
    links: dict[tuple[int, ...], Mapping[int, Link]] = {}
    executors: dict[str, Executor] = {}
    references: dict[str, Gradients] = {}
    outcomes = []
    for case in cases:
        plan = case.made
        if plan.tree.fanouts not in links:
            links[plan.tree.fanouts] = make_tree_links(plan, rank)
        tokens = make_tokens(plan)
        model = repr((case.keys, case.trainable))
        module = repr((model, case.slice_tokens, case.mlp_slice_tokens, case.offload, case.compiler))
        if module not in executors:
            executors[module] = make_executor(case, rank, links=links[plan.tree.fanouts])
        executor = replace(
            executors[module],
            links=links[plan.tree.fanouts],
            kernel=CountingKernel(),
            timer=AttentionTimer(CPU),
            streaming=case.streaming,
            place=Place(),
        )
        executor.root.zero_grad()
        with recorded(executor, plan) as log, all_float64():
            planned = planned_gradients(executor, plan, tokens, weighted=case.weighted)
        logs: list[Any] = [None] * num_ranks
        dist.all_gather_object(logs, log)
        if rank != 0:
            continue
        question = repr((model, plan.batch, case.weighted))
        if question not in references:
            alone = make_model(case.keys, reference_attention(executor.shape), trainable=case.trainable)
            with all_float64():
                if case.weighted:
                    references[question] = weighted_gradients(alone, tokens, make_weights(plan))
                else:
                    references[question] = reference_gradients(alone, tokens)
        verification = compare_gradients(planned, references[question], sum(n - 1 for n in plan.batch.lengths))
        # Frozen layers are not recomputed, and what autograd never reaches has no backward.
        faults = order_faults(logs)
        if case.trainable is None:
            faults += schedule_faults(make_schedule(plan, streaming=case.streaming), executor.shape, logs)
        outcomes.append(Outcome(verification, tuple(faults)))
    return outcomes


def order_faults(logs: Sequence[Log]) -> list[str]:
    """Whether all ranks' sequences of exchanges and gathers fit one total order."""
    before: dict[tuple[int, int, int], set[tuple[int, int, int]]] = {}
    for log in logs:
        numbers: Counter[tuple[int, int]] = Counter()
        last: tuple[int, int, int] | None = None
        for level, first in log.issued:
            event = (level, first, numbers[level, first])
            numbers[level, first] += 1
            before.setdefault(event, set())
            if last is not None:
                before[event].add(last)
            last = event
    try:
        tuple(TopologicalSorter(before).static_order())
    except CycleError as error:
        return [f"no total order of what ranks issue: {error.args[1]}"]
    return []


def schedule_faults(schedule: Schedule, shape: ModelShape, logs: Sequence[Log]) -> list[str]:
    """Whether every rank issued exchanges and gathers, and called kernels, as the schedule says."""
    plan, faults = schedule.plan, []
    for rank, log in enumerate(logs):
        issued: list[tuple[int, int]] = []
        kernel: Counter[str] = Counter()
        for number, microbatch in enumerate(plan.microbatches):
            issued += scheduled(schedule, number, rank, shape.num_layers)
            recomputed = shape.num_layers - microbatch.num_kept_layers
            for placement in microbatch.on_rank(rank):
                calls = num_kernel_calls(plan, placement, rank, shape)
                kernel["forward"] += calls * (shape.num_layers + (recomputed if placement.keep == "none" else 0))
                kernel["backward"] += calls * shape.num_layers
        if log.issued != issued:
            faults.append(f"rank {rank} issued {log.issued}, but the schedule says {issued}")
        if log.kernel != +kernel:
            faults.append(f"rank {rank} called kernels {log.kernel}, but the schedule says {+kernel}")
    return faults


def scheduled(schedule: Schedule, number: int, rank: int, num_layers: int) -> list[tuple[int, int]]:
    """All that a rank issues in one microbatch, as in `Log.issued`, if parameters are cut over all ranks."""
    tree, microbatch = schedule.plan.tree, schedule.plan.microbatches[number]
    groups = microbatch.on_rank(rank)

    def attention(which: Pass) -> list[list[tuple[int, int]]]:
        """What each turn issues, one thing or nothing."""
        most = {p.group.level: num_exchanges(p, which) for p in groups}
        return [
            [(turn.level, tree.group(turn.level, rank).first_rank)] * (turn.number < most[turn.level])
            for turn in schedule.turns(number, rank, which)
        ]

    def layer(which: Pass, following: int, before: Sequence[list[tuple[int, int]]] = ()) -> list[tuple[int, int]]:
        turns = attention(which)
        place = schedule.turns_before_gather(number, rank, which)
        gather = [(GATHER, following)] * (0 <= following < num_layers)
        parts = [gather, *before, *turns] if place == 0 else [*before, *turns[:place], gather, *turns[place:]]
        return [event for part in parts for event in part]

    issued = [(GATHER, ROOT), (GATHER, 0)]
    for each in range(num_layers):
        issued += layer(Pass.FORWARD, each + 1)
    issued.append((GATHER, num_layers - 1))
    for each in reversed(range(num_layers)):
        again = attention(Pass.RECOMPUTE) if each < num_layers - microbatch.num_kept_layers else []
        issued += layer(Pass.BACKWARD, each - 1, again)
    return issued if tree.num_ranks > 1 else [event for event in issued if event[0] != GATHER]


def num_kernel_calls(plan: Plan, placement: Placement, rank: int, shape: ModelShape) -> int:
    """One for each ring member of whose keys this rank's queries see any, or slice in which it has a head."""
    group, ring_degree = placement.group, placement.ring_degree
    inside = group.degree // ring_degree
    member, place = divmod(rank - group.first_rank, inside)
    heads = head_shares(shape.num_heads, shape.num_kv_heads, inside)
    if ring_degree == 1:
        return sum(bool(slice_of[place].query) for slice_of in head_slices(heads, placement.num_slices))
    if not heads[place].query:
        return 0
    (microbatch,) = (n for n, microbatch in enumerate(plan.microbatches) if placement in microbatch.placements)
    held: list[list[tuple[int, int]]] = [[] for _ in range(ring_degree)]
    for number, other in enumerate(group.ranks):
        for shard in rank_spans(plan, other)[microbatch].shards:
            if shard.placement == placement:
                held[number // inside] += [(s.sequence, p) for s in shard.spans for p in range(s.start, s.stop)]
    queries = held[member]
    return sum(any(a == c and b >= d for a, b in queries for c, d in keys) for keys in held)


def logits_by_token(executor: Executor, plan: Plan, tokens: Mapping[int, Tensor]) -> dict[tuple[int, int], Tensor]:
    """Logits of this rank's tokens by (sequence id, position), without gradients."""
    slices: list[Tensor] = []
    head: nn.Module = executor.root.model.get_output_embeddings()  # type: ignore[union-attr,operator]
    handle = head.register_forward_hook(lambda module, args, output: slices.append(output.detach().clone()))
    found: dict[tuple[int, int], Tensor] = {}
    local = load(executor, plan, tokens)
    with torch.no_grad():
        for microbatch, origin in zip(local.microbatches, origins(plan, executor.rank), strict=True):
            slices.clear()
            executor.root(microbatch.tokens, microbatch.attention)
            found.update(zip(origin, torch.cat(slices), strict=False))
    handle.remove()
    return found
