"""Every planner on the ground of a run: caps, remedies, degenerate batches."""

from __future__ import annotations

import json

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import Cluster, GroupTree
from nestsp.cost.work import sequence_work
from nestsp.errors import ConfigError, InfeasibleError
from nestsp.known_models import known_model
from nestsp.plan import Capabilities
from nestsp.planners import PLANNERS, check_planner, make_planner
from nestsp.planners.baselines import StaticDegree, longest_first
from nestsp.planners.search import NestedGroups
from nestsp.planners.task import Planned, PlanningTask
from nestsp.shape import ModelShape
from nestsp.shard import rank_spans
from nestsp.simulate import imbalance, plan_work

SHAPE = ModelShape("llama", 4, 256, 8, 4, 32, 512, 259)
TREE = GroupTree((2, 2))
LARGE_TREE = GroupTree((2,) * 6)
RECOMPUTES = Capabilities(rings=False, num_kept_layers=0)


def task(
    tree: GroupTree,
    cap: int | None,
    planner: str = "nsp",
    degree: int | None = None,
    *,
    shape: ModelShape = SHAPE,
    memory_bytes: int = 10**15,
    profile: str = "h100",
) -> PlanningTask:
    return PlanningTask(
        planner=planner,
        degree=degree,
        max_tokens_per_rank=cap,
        shape=shape,
        cluster=Cluster(1, tree.num_ranks),
        tree=tree,
        profile=profile,
        memory_per_rank_bytes=memory_bytes,
        can=RECOMPUTES,
    )


def solve(of: PlanningTask, batch: SequenceBatch) -> Planned:
    """The task's plan, which keeps the task's limits."""
    planned = of.solver()(batch)
    of.check(planned.plan, of.cost())
    assert planned.plan.batch == batch
    return planned


def every(tree: GroupTree, cap: int) -> list[PlanningTask]:
    """Each planner; static on all ranks."""
    return [task(tree, cap, name, tree.num_ranks if name == "static" else None) for name in PLANNERS]


def named(of: PlanningTask) -> str:
    return f"{of.planner}-{of.tree}"


@pytest.mark.parametrize("of", every(TREE, 1024), ids=named)
def test_a_sequence_that_fills_every_rank_to_the_cap_is_accepted(of: PlanningTask) -> None:
    """G15: the cap counts local tokens after sharding: 4,096 on 4 ranks need 1,024."""
    assert solve(of, SequenceBatch.of_lengths([4096])).plan.rank_tokens(0) == [1024] * 4


@pytest.mark.parametrize("of", every(TREE, 1023), ids=named)
def test_one_token_less_of_cap_is_refused_with_need_cap_and_remedies(of: PlanningTask) -> None:
    """G15."""
    with pytest.raises(InfeasibleError) as refused:
        of.solver()(SequenceBatch((77, 78), (9, 4096)))
    assert str(refused.value) == (
        "sequence 78 (4,096 tokens) needs 1,024 tokens on each of 4 ranks, but planner.max_tokens_per_rank is 1,023; "
        "raise it to 1,024, take 5 ranks, or set data.max_length"
    )


def test_the_remedies_of_a_refusal_do_help() -> None:
    """G15."""
    batch = SequenceBatch.of_lengths([4096])
    solve(task(TREE, 1024), batch)
    solve(task(GroupTree((5,)), 1023), batch)


def test_static_refuses_a_sequence_over_its_own_degree_though_the_tree_could_hold_it() -> None:
    of = task(TREE, 1024, "static", 2)
    with pytest.raises(InfeasibleError, match=r"sequence 0 \(4,096 tokens\) does not fit on 2 ranks"):
        of.solver()(SequenceBatch.of_lengths([4096]))
    with pytest.raises(InfeasibleError, match=r"sequence 9 \(4,096 tokens\) does not fit on planner\.degree = 2 ranks"):
        of.check_longest(SequenceBatch((9,), (4096,)))
    of.check_longest(SequenceBatch((9,), (2048,)))


@pytest.mark.parametrize("of", [*every(TREE, 8), *every(GroupTree(()), 8)], ids=named)
def test_an_empty_batch_is_one_microbatch_in_which_no_rank_holds_tokens(of: PlanningTask) -> None:
    """G17, F1: every rank still runs one pass."""
    plan = solve(of, SequenceBatch.of_lengths([])).plan
    assert len(plan.microbatches) == 1
    assert [spans.num_tokens for rank in range(plan.tree.num_ranks) for spans in rank_spans(plan, rank)] == [
        0
    ] * plan.tree.num_ranks
    assert imbalance(plan_work(plan, SHAPE)) == 0


def test_ten_million_tokens_are_spread_over_all_ranks() -> None:
    """G17."""
    plan = solve(task(LARGE_TREE, 156_252), SequenceBatch.of_lengths([10**7, 1, 1])).plan
    assert plan.num_sequences_by_degree()[64] >= 1


@pytest.mark.parametrize("of", every(GroupTree((2, 2, 2)), 4), ids=named)
def test_more_ranks_than_tokens_leaves_ranks_without_any(of: PlanningTask) -> None:
    """B11, F1: exactness wins over refusing: a degree above the length only leaves shares empty."""
    plan = solve(of, SequenceBatch.of_lengths([1, 2, 3])).plan
    assert sum(plan.rank_tokens(0)) == 6
    assert 0 in plan.rank_tokens(0)


@pytest.mark.parametrize("of", every(GroupTree((2, 2, 2)), 4), ids=named)
def test_sequences_of_one_token_are_planned(of: PlanningTask) -> None:
    """B7, B13."""
    plan = solve(of, SequenceBatch.of_lengths([1] * 19)).plan
    assert sum(map(sum, map(plan.rank_tokens, range(len(plan.microbatches))))) == 19


def test_nsp_plans_512_sequences_on_64_ranks_in_balance() -> None:
    """Scale. No time is asserted."""
    shape = ModelShape("llama", 4, 256, 64, 8, 32, 512, 259)
    lengths = [int(200 * (512 / (i + 1)) ** 0.9) for i in range(512)]
    plan = solve(task(LARGE_TREE, 20_000, shape=shape), SequenceBatch.of_lengths(lengths)).plan
    assert len(plan.num_sequences_by_degree()) >= 3
    assert imbalance(plan_work(plan, shape)) < 0.2


@pytest.mark.parametrize("cap", [20_480, None])
def test_nsp_splits_long_sequences_widely_and_keeps_short_ones_on_single_ranks(cap: int | None) -> None:
    """The point of nesting, at the same time on the same ranks; for the cap, and without one for time."""
    of = task(TREE, cap, shape=known_model("llama-3.1-8b"), memory_bytes=10**12)
    plan = solve(of, SequenceBatch.of_lengths([52_000, *[1_800 - 20 * i for i in range(16)]])).plan
    degree = {s: p.group.degree for _, p in plan.placements() for s in p.sequences}
    assert len(plan.microbatches) == 1
    assert degree.pop(0) == 4
    assert set(degree.values()) == {1}


def test_ranks_of_one_group_get_unequal_turns_of_short_sequences_when_few_are_there() -> None:
    """F1: L=[900,1,1] on four ranks of degree 1: two ranks get nothing, and the pass count is the same for all."""
    plan = solve(task(TREE, 900, "static", 1), SequenceBatch.of_lengths([900, 1, 1])).plan
    assert sorted(plan.rank_tokens(0)) == [0, 1, 1, 900]
    assert {len(rank_spans(plan, rank)) for rank in range(4)} == {len(plan.microbatches)} == {1}


def test_balance_counts_work_not_tokens() -> None:
    """G18: one sequence of 8,000 costs more than eight of 1,000, by just the attention between them."""
    long, short = sequence_work(SHAPE, 8000), sequence_work(SHAPE, 1000)
    assert long.linear == 8 * short.linear
    assert long.attention / (8 * short.attention) == pytest.approx(8, rel=1e-3)
    of = task(GroupTree((2,)), 25_000, "static", 1, profile="cpu")
    plan = solve(of, SequenceBatch.of_lengths([8000] + [1000] * 24)).plan
    if len(plan.microbatches) == 1:
        assert plan.rank_tokens(0)[0] < plan.rank_tokens(0)[1]
    assert imbalance(plan_work(plan, SHAPE)) < 0.1


def test_make_planner_gives_the_named_planner() -> None:
    ground = task(TREE, 9).ground()
    assert make_planner("nsp", ground) == NestedGroups(ground)
    assert make_planner("static", ground, 2) == StaticDegree(ground, 2)


SAMPLE = [SequenceBatch.of_lengths([4_000, 900, 40]), SequenceBatch.of_lengths([1_000] * 4)]


def test_static_without_a_degree_takes_the_one_that_is_fastest_over_the_sample() -> None:
    of = task(TREE, None, "static", profile="cpu")
    totals = {}
    for degree in (4, 2, 1):
        given = task(TREE, None, "static", degree, profile="cpu")
        totals[degree] = sum(solve(given, batch).makespan_s for batch in SAMPLE)
    chosen = of.with_degree(SAMPLE, SequenceBatch.of_lengths([4_000]))
    assert chosen.degree == min(totals, key=totals.__getitem__)
    assert chosen.with_degree([], SequenceBatch.of_lengths([1])) == chosen, "a degree stays"


@pytest.mark.parametrize(("longest", "degrees"), [(1, {1, 2, 4}), (10, {2, 4}), (18, {2, 4}), (19, {4}), (36, {4})])
def test_the_degree_that_is_taken_holds_the_runs_longest_sequence(longest: int, degrees: set[int]) -> None:
    of = task(TREE, 9, "static").with_degree([SequenceBatch.of_lengths([1])], SequenceBatch.of_lengths([longest]))
    assert of.degree in degrees
    of.check_longest(SequenceBatch.of_lengths([longest]))


def test_a_run_whose_longest_sequence_fits_no_degree_is_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"sequence 0 \(37 tokens\) needs 10 tokens on each of 4 ranks"):
        task(TREE, 9, "static").with_degree([], SequenceBatch.of_lengths([37]))


@pytest.mark.parametrize(
    ("name", "degree", "sentence"),
    [
        (
            "nps",
            None,
            "planner.name is 'nps', but the planners are static, batch-adaptive, basp, disjoint, flexsp, nsp; "
            "did you mean 'nsp'?",
        ),
        (
            "nsp",
            2,
            "planner.degree is 2, but the nsp planner chooses degrees itself; leave it out, or take "
            "planner.name = static",
        ),
        ("static", 3, "the degree asked for is 3, but the tree 2x2 has only degrees 1, 2, 4; take one"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(name: str, degree: int | None, sentence: str) -> None:
    for refuse in (
        lambda: check_planner(name, degree, TREE),
        lambda: make_planner(name, task(TREE, 9).ground(), degree),
    ):
        with pytest.raises(ConfigError) as refused:
            refuse()
        assert str(refused.value) == sentence


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_names_its_plans_after_itself(name: str) -> None:
    of = task(TREE, 9, name, 4 if name == "static" else None)
    assert solve(of, SequenceBatch.of_lengths([12, 3])).plan.planner == name


def test_a_task_and_what_it_plans_go_through_json_unchanged() -> None:
    of = task(GroupTree((3, 2)), 900)
    again = PlanningTask.from_json(json.loads(json.dumps(of.to_json())))
    assert again == of
    planned = solve(again, SequenceBatch.of_lengths([900, 40, 41]))
    assert Planned.from_json(json.loads(json.dumps(planned.to_json()))) == planned
    assert planned.gap >= 0
    assert planned.planning_s > 0


def test_a_plan_of_a_larger_limit_is_refused_under_a_smaller_one() -> None:
    shape = known_model("llama-3.2-1b")
    large, small = (task(TREE, None, shape=shape, memory_bytes=n * 2**30) for n in (60, 16))
    planned = large.solver()(SequenceBatch.of_lengths([20_000] * 8))
    large.check(planned.plan, large.cost())
    with pytest.raises(
        InfeasibleError, match=r"rank \d would need .* GiB, but may use 16\.0 GiB; plan the batch again"
    ):
        small.check(planned.plan, small.cost())


def test_longest_first_keeps_equal_lengths_in_order() -> None:
    assert longest_first(SequenceBatch.of_lengths([3, 5, 3, 5, 9])) == [4, 1, 3, 0, 2]
