"""FlexSP's published cost model as a ground for planners.

Source: Wang et al., FlexSP (arXiv:2412.01523) and its authors' code (Apache-2.0): constants fitted on GPT models on
8 hosts of 8 A100-40GB, NVLink inside a host and 400 Gb/s InfiniBand between hosts; forward and backward pass of the
whole model in bf16. All its times are in ms, its bandwidths in MiB per ms.

A rank's time in a microbatch is beta1 + the sum, over the groups that it works for, of compute and all-to-all; a
microbatch ends with its slowest rank, and a batch is the sum of its microbatches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster
from nestsp.errors import InfeasibleError
from nestsp.plan import Plan
from nestsp.planners.ground import Ground, Prices, Verdict

__all__ = ["GPT_7B", "GPT_13B", "GPT_30B", "FlexSPModel", "communication_free_bound_s", "flexsp_ground"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FlexSPModel:
    """Fitted constants of one model, as published."""

    num_layers: int
    hidden_size: int
    alpha1_ms_per_token2: float
    alpha2_ms_per_token: float
    beta1_ms: float
    memory_mib_per_token: float
    params_billion: float
    memory_limit_mib: float = 30 * 1024
    num_ranks: int = 64
    bandwidth: tuple[tuple[int, float], ...] = (
        (2, 119.54),
        (4, 104.07),
        (8, 96.5),
        (16, 10.33),
        (32, 5.94),
        (64, 4.87),
    )

    @property
    def tokens_per_rank(self) -> float:
        """Tokens that a rank may hold beside its model states (ZeRO-3, 16 bytes a parameter)."""
        states = self.params_billion * 16 * 1024 / self.num_ranks
        return (self.memory_limit_mib - states) / self.memory_mib_per_token

    def compute_ms(self, lengths: Floats, degree: int) -> Floats:
        """Compute of each sequence on a group."""
        work: Floats = (self.alpha1_ms_per_token2 * lengths**2 + self.alpha2_ms_per_token * lengths) / degree
        return work

    def all_to_all_ms(self, lengths: Floats, degree: int) -> Floats:
        """All-to-alls of each sequence on a group: q, k, v and o, forward and backward."""
        if degree == 1:
            return 0.0 * lengths
        mib = 4 * 2 * self.num_layers * self.hidden_size * lengths * 2 / 2**20
        return mib / degree / dict(self.bandwidth)[degree]

    def all_to_all_share(self, length: int, degree: int) -> float:
        """Part of a microbatch's time that is all-to-all, where sequences of one length fill a group's memory."""
        count = max(1, int(self.tokens_per_rank * degree // length))
        lengths = np.full(count, float(length))
        exchange = float(self.all_to_all_ms(lengths, degree).sum())
        return exchange / (exchange + float(self.compute_ms(lengths, degree).sum()) + self.beta1_ms)


# Parameters are those at a context of 384K.
GPT_7B = FlexSPModel(32, 4096, 5.128e-06, 0.1839576, 629.3563, 4.480441895, 7.850)
GPT_13B = FlexSPModel(40, 5120, 9.2852e-06, 0.3060189, 1132.5632, 4.220439453, 14.032)
GPT_30B = FlexSPModel(60, 6656, 1.54262e-05, 0.8035742, 2789.3644, 3.417381836, 32.715)


def communication_free_bound_s(model: FlexSPModel, batch: SequenceBatch) -> float:
    """No plan is faster by this model: perfect balance, no all-to-all, the least number of microbatches."""
    lengths = np.array(batch.lengths, float)
    least = max(1, int(np.ceil(lengths.sum() / (model.tokens_per_rank * model.num_ranks))))
    return (float(model.compute_ms(lengths, model.num_ranks).sum()) + least * model.beta1_ms) / 1e3


def rank_times_s(model: FlexSPModel, plan: Plan) -> tuple[Floats, Floats, Floats]:
    """For each microbatch and rank: linear compute, attention and all-to-all, float64 [microbatches, ranks] each."""
    shape = (len(plan.microbatches), plan.tree.num_ranks)
    linear, attention, exchange = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for number, placement in plan.placements():
        group = placement.group
        lengths = np.array([plan.batch.lengths[s] for s in placement.sequences], float)
        ranks = slice(group.first_rank, group.ranks.stop)
        tokens, squares = float(lengths.sum()), float((lengths**2).sum())
        linear[number, ranks] += model.alpha2_ms_per_token * tokens / group.degree / 1e3
        attention[number, ranks] += model.alpha1_ms_per_token2 * squares / group.degree / 1e3
        exchange[number, ranks] += float(model.all_to_all_ms(lengths, group.degree).sum()) / 1e3
    return linear, attention, exchange


def batch_time_s(model: FlexSPModel, plan: Plan) -> float:
    """Time of a plan, nothing streamed."""
    return _judge(model, plan).makespan_s


def _judge(model: FlexSPModel, plan: Plan) -> Verdict:
    linear, attention, exchange = rank_times_s(model, plan)
    busy = linear + attention + exchange
    makespan_s = float(busy.max(axis=1).sum()) + len(plan.microbatches) * model.beta1_ms / 1e3
    return Verdict(makespan_s, linear + attention, exchange)


def streamed_time_s(model: FlexSPModel, plan: Plan) -> float:
    """Time of a plan whose groups take turns, as the executor runs them; the better of two level orders.

    All layers are equal, a third of the work is forward and two thirds backward, and the all-to-all is split evenly
    into the four exchanges of a layer. A rank has one exchange at a time. It starts when its last member has issued it,
    and overlaps the attention of the rank's other groups, neither its own group's nor the linear part.
    """
    orders = [plan.level_order, tuple(reversed(plan.level_order))]
    numbers = range(len(plan.microbatches))
    walked = [sum(_walk_s(model, plan, number, order) for number in numbers) for order in orders]
    return min(walked) + len(plan.microbatches) * model.beta1_ms / 1e3


def _walk_s(model: FlexSPModel, plan: Plan, number: int, level_order: tuple[int, ...]) -> float:
    last = plan.tree.num_levels - 1
    linear = np.zeros(plan.tree.num_ranks)
    groups: dict[int, list[tuple[slice, float, float]]] = {}
    for placement in plan.microbatches[number].placements:
        degree = placement.group.degree
        ranks = slice(placement.group.first_rank, placement.group.ranks.stop)
        lengths = np.array([plan.batch.lengths[s] for s in placement.sequences], float)
        linear[ranks] += model.alpha2_ms_per_token * float(lengths.sum()) / degree / 1e3
        attention = model.alpha1_ms_per_token2 * float((lengths**2).sum()) / degree / 1e3
        exchange = float(model.all_to_all_ms(lengths, degree).sum()) / 1e3
        groups.setdefault(placement.group.level, []).append((ranks, attention, exchange))
    now, links, layers = np.zeros(plan.tree.num_ranks), np.zeros(plan.tree.num_ranks), model.num_layers
    for part in (1 / 3, 2 / 3):
        for _ in range(layers):
            now = now + linear * part / layers
            arrives: dict[tuple[int, int], float] = {}
            for turn in range(3):
                for level in level_order:
                    for ranks, attention, exchange in groups.get(level, ()):
                        key = (level, ranks.start)
                        if level == last:
                            now[ranks] += attention * part / layers if turn == 0 else 0.0
                            continue
                        now[ranks] = np.maximum(now[ranks], arrives.get(key, 0.0))
                        now[ranks] += attention * part / layers if turn == 1 else 0.0
                        if turn < 2:
                            start = max(float(now[ranks].max()), float(links[ranks].max()))
                            arrives[key] = start + exchange / 4 / layers
                            links[ranks] = arrives[key]
    return float(now.max())


def overlapped_time_s(model: FlexSPModel, plan: Plan) -> float:
    """What overlapping the linear part too would give at best: a rank computes or exchanges, whichever is longer."""
    linear, attention, exchange = rank_times_s(model, plan)
    longer = np.maximum(linear + attention, exchange)
    return float(longer.max(axis=1).sum()) + len(plan.microbatches) * model.beta1_ms / 1e3


def flexsp_ground(model: FlexSPModel) -> Ground:
    """The ground of the published model, on hosts of 8 ranks; nothing is streamed, memory is spent on nothing."""
    tree = Cluster(model.num_ranks // 8, 8).default_tree()
    degrees = [tree.degree(level) for level in range(tree.num_levels)]
    one = np.ones(1)
    linear = [model.alpha2_ms_per_token / degree / 1e3 for degree in degrees]
    exchange = [float(model.all_to_all_ms(one, degree)[0]) / 1e3 for degree in degrees]
    square = tuple(model.alpha1_ms_per_token2 / degree / 1e3 for degree in degrees)
    prices = Prices(tuple(a + b for a, b in zip(linear, exchange, strict=True)), square, np.square)
    return Ground(
        tree=tree,
        linear_s=tuple(linear),
        square_s=square,
        squares=np.square,
        exchange_s=tuple(exchange),
        bytes_per_token=tuple(1.0 / degree for degree in degrees),
        free_bytes=model.tokens_per_rank,
        fixed_s=model.beta1_ms / 1e3,
        least_part=1.0,
        guesses=(prices,),
        more_guesses=(),
        whole=prices,
        floor=prices,
        head_s=0.0,
        gathers_s=0.0,
        layer_s=0.0,
        layer_bytes=0.0,
        token_bytes=1.0,
        num_layers=0,
        num_crossing=sum(degree > 8 for degree in degrees),
        num_heads=model.num_ranks,
        check=lambda batch: _check(model, batch),
        in_slices=lambda plan: plan,
        as_any_kind=lambda plan: plan,
        finish=lambda plan: dataclasses.replace(plan),
        evaluate=lambda plan: _judge(model, plan),
        evaluate_roughly=lambda plan: _judge(model, plan),
        place_gathers=lambda plan: (plan, _judge(model, plan)),
    )


def _check(model: FlexSPModel, batch: SequenceBatch) -> None:
    longest = max(batch.lengths, default=0)
    if longest > model.tokens_per_rank * model.num_ranks:
        raise InfeasibleError(f"a sequence of {longest:,} tokens does not fit into {model.num_ranks} ranks")
