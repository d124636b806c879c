from __future__ import annotations

import pytest

from nestsp.batch import SequenceBatch
from nestsp.cluster import GroupTree
from nestsp.config import PlannerConfig
from nestsp.cost.work import sequence_work
from nestsp.errors import ConfigError, InfeasibleError
from nestsp.planners import PLANNERS, NspPlanner, StaticPlanner, check_lengths, make_planner
from nestsp.planners.packing import longest_first, smallest_fitting_level
from nestsp.shape import ModelShape
from nestsp.shard import rank_spans
from nestsp.simulate import imbalance, plan_work

SHAPE = ModelShape("llama", 4, 256, 8, 4, 32, 512, 259)
TREE = GroupTree((2, 2))
LARGE_TREE = GroupTree((2,) * 6)


def _both(tree: GroupTree, cap: int) -> list[NspPlanner | StaticPlanner]:
    return [NspPlanner(tree, SHAPE, cap), StaticPlanner(tree, SHAPE, cap, tree.num_ranks)]


@pytest.mark.parametrize("planner", _both(TREE, 1024))
def test_a_sequence_that_fills_every_rank_to_the_cap_is_accepted(planner: NspPlanner | StaticPlanner) -> None:
    """G15: the cap counts local tokens after sharding: 4,096 on 4 ranks need 1,024."""
    plan = planner.plan(SequenceBatch.of_lengths([4096]))
    assert plan.rank_tokens(0) == [1024] * 4


@pytest.mark.parametrize("planner", _both(TREE, 1023))
def test_one_token_less_of_cap_is_refused_with_need_cap_and_remedies(planner: NspPlanner | StaticPlanner) -> None:
    """G15."""
    with pytest.raises(InfeasibleError) as refused:
        planner.plan(SequenceBatch((77, 78), (9, 4096)))
    assert str(refused.value) == (
        "sequence 78 (4,096 tokens) needs 1,024 tokens on each of 4 ranks, but planner.max_tokens_per_rank is 1,023; "
        "raise it to 1,024, take 5 ranks, or set data.max_length"
    )


def test_the_remedies_of_a_refusal_do_help() -> None:
    """G15."""
    batch = SequenceBatch.of_lengths([4096])
    NspPlanner(TREE, SHAPE, 1024).plan(batch)
    NspPlanner(GroupTree((5,)), SHAPE, 1023).plan(batch)


def test_static_refuses_a_sequence_over_its_own_degree_though_the_tree_could_hold_it() -> None:
    with pytest.raises(InfeasibleError, match=r"sequence 0 \(4,096 tokens\) needs 2,048 tokens on each of 2 ranks"):
        StaticPlanner(TREE, SHAPE, 1024, 2).plan(SequenceBatch.of_lengths([4096]))


def test_static_of_a_degree_that_the_tree_lacks_names_those_it_has() -> None:
    with pytest.raises(ConfigError, match=r"is 3, but the tree 2x2 has only degrees 1, 2, 4; take one"):
        StaticPlanner(TREE, SHAPE, 1024, 3).plan(SequenceBatch.of_lengths([4]))


@pytest.mark.parametrize("planner", [*_both(TREE, 8), *_both(GroupTree(()), 8)])
def test_an_empty_batch_is_one_microbatch_in_which_no_rank_holds_tokens(planner: NspPlanner | StaticPlanner) -> None:
    """G17, F1: every rank still runs one pass."""
    plan = planner.plan(SequenceBatch.of_lengths([]))
    plan.check(max_tokens_per_rank=8)
    assert len(plan.microbatches) == 1
    assert [spans.num_tokens for rank in range(plan.tree.num_ranks) for spans in rank_spans(plan, rank)] == [
        0
    ] * plan.tree.num_ranks
    assert imbalance(plan_work(plan, SHAPE)) == 0


def test_ten_million_tokens_are_spread_over_all_ranks() -> None:
    """G17."""
    plan = NspPlanner(LARGE_TREE, SHAPE, 156_250).plan(SequenceBatch.of_lengths([10**7, 1, 1]))
    assert plan.num_sequences_by_degree()[64] >= 1
    plan.check(max_tokens_per_rank=156_250)


@pytest.mark.parametrize("planner", _both(GroupTree((2, 2, 2)), 4))
def test_more_ranks_than_tokens_leaves_ranks_without_any(planner: NspPlanner | StaticPlanner) -> None:
    """B11, F1: exactness wins over refusing: a degree above the length only leaves shares empty."""
    plan = planner.plan(SequenceBatch.of_lengths([1, 2, 3]))
    plan.check(max_tokens_per_rank=4)
    assert sum(plan.rank_tokens(0)) == 6
    assert 0 in plan.rank_tokens(0)


@pytest.mark.parametrize("planner", _both(GroupTree((2, 2, 2)), 4))
def test_sequences_of_one_token_are_planned(planner: NspPlanner | StaticPlanner) -> None:
    """B7, B13."""
    plan = planner.plan(SequenceBatch.of_lengths([1] * 19))
    plan.check(max_tokens_per_rank=4)
    assert sum(map(sum, map(plan.rank_tokens, range(len(plan.microbatches))))) == 19


def test_nsp_plans_512_sequences_on_64_ranks_in_balance() -> None:
    """Scale. No time is asserted; about 0.2 s on one core."""
    shape = ModelShape("llama", 4, 256, 64, 8, 32, 512, 259)
    lengths = [int(200 * (512 / (i + 1)) ** 0.9) for i in range(512)]
    plan = NspPlanner(LARGE_TREE, shape, 20_000).plan(SequenceBatch.of_lengths(lengths))
    plan.check(max_tokens_per_rank=20_000)
    assert len(plan.num_sequences_by_degree()) >= 3
    assert imbalance(plan_work(plan, shape)) < 0.2


@pytest.mark.parametrize("cap", [2048, 8192])
def test_nsp_splits_long_sequences_widely_and_keeps_short_ones_on_single_ranks(cap: int) -> None:
    """The point of nesting, at the same time on the same ranks; for memory, and where memory is ample for balance."""
    plan = NspPlanner(TREE, SHAPE, cap).plan(SequenceBatch.of_lengths([5200, 1400, 500, 420, 300, 180]))
    degree = {s: p.group.degree for _, p in plan.placements() for s in p.sequences}
    assert len(plan.microbatches) == 1
    assert degree[0] == 4
    assert {degree[s] for s in (3, 4, 5)} == {1}


def test_ranks_of_one_group_get_unequal_turns_of_short_sequences_when_few_are_there() -> None:
    """F1: L=[900,1,1] on four ranks of degree 1: two ranks get nothing, and the pass count is the same for all."""
    plan = StaticPlanner(TREE, SHAPE, 900, 1).plan(SequenceBatch.of_lengths([900, 1, 1]))
    assert sorted(plan.rank_tokens(0)) == [0, 1, 1, 900]
    assert {len(rank_spans(plan, rank)) for rank in range(4)} == {len(plan.microbatches)} == {1}


def test_balance_counts_work_not_tokens() -> None:
    """G18: one sequence of 8,000 costs more than eight of 1,000, by just the attention between them."""
    long, short = sequence_work(SHAPE, 8000), sequence_work(SHAPE, 1000)
    assert long.linear == 8 * short.linear
    assert long.attention / (8 * short.attention) == pytest.approx(8, rel=1e-3)
    plan = StaticPlanner(GroupTree((2,)), SHAPE, 25_000, 1).plan(SequenceBatch.of_lengths([8000] + [1000] * 24))
    assert plan.rank_tokens(0)[0] < plan.rank_tokens(0)[1]
    assert imbalance(plan_work(plan, SHAPE)) < 0.05


def test_make_planner_gives_the_named_planner_with_its_settings() -> None:
    nsp = make_planner(PlannerConfig(name="nsp", max_tokens_per_rank=9), TREE, SHAPE, 12)
    static = make_planner(PlannerConfig(name="static", degree=2, max_tokens_per_rank=9), TREE, SHAPE, 12)
    assert nsp == NspPlanner(TREE, SHAPE, 9)
    assert static == StaticPlanner(TREE, SHAPE, 9, 2)


@pytest.mark.parametrize(("longest", "degree"), [(1, 1), (9, 1), (10, 2), (18, 2), (19, 4), (36, 4), (37, 4)])
def test_static_without_a_degree_takes_the_least_that_holds_the_longest(longest: int, degree: int) -> None:
    planner = make_planner(PlannerConfig(name="static", max_tokens_per_rank=9), TREE, SHAPE, longest)
    assert planner == StaticPlanner(TREE, SHAPE, 9, degree)


def test_a_given_degree_that_cannot_hold_the_longest_is_refused_before_the_run() -> None:
    """G15: 18 tokens fit 2 ranks of 9; 19 do not."""
    config = PlannerConfig(name="static", degree=2, max_tokens_per_rank=9)
    assert make_planner(config, TREE, SHAPE, 18) == StaticPlanner(TREE, SHAPE, 9, 2)
    with pytest.raises(InfeasibleError, match=r"has 19 tokens and needs 10 on each of planner\.degree = 2 ranks"):
        make_planner(config, TREE, SHAPE, 19)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            PlannerConfig(name="nps", max_tokens_per_rank=9),
            "planner.name is 'nps', but the planners are static, nsp; did you mean 'nsp'?",
        ),
        (
            PlannerConfig(name="nsp", degree=2, max_tokens_per_rank=9),
            "planner.degree is 2, but the nsp planner chooses a degree for each sequence; leave it out, or take "
            "planner.name = static",
        ),
        (
            PlannerConfig(name="static", degree=3, max_tokens_per_rank=9),
            "the degree asked for is 3, but the tree 2x2 has only degrees 1, 2, 4; take one",
        ),
    ],
)
def test_make_planner_refuses_settings_that_do_not_go_together(config: PlannerConfig, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_planner(config, TREE, SHAPE, 12)
    assert str(refused.value) == sentence


def test_every_planner_names_its_plans_after_itself() -> None:
    for name in PLANNERS:
        planner = make_planner(PlannerConfig(name=name, max_tokens_per_rank=9), TREE, SHAPE, 12)
        assert planner.plan(SequenceBatch.of_lengths([12, 3])).planner == name


def test_nsp_takes_a_static_degree_that_needs_fewer_microbatches_even_at_more_work() -> None:
    """Found by search: nested packing alone needs three microbatches here, at a tenth less (weighted) work."""
    shape = ModelShape("llama", 2, 8, 1, 1, 8, 16, 100)
    batch = SequenceBatch.of_lengths([4, 4, 6, 11])
    assert len(StaticPlanner(GroupTree((2,)), shape, 7, 2).plan(batch).microbatches) == 2
    assert len(NspPlanner(GroupTree((2,)), shape, 7).plan(batch).microbatches) == 2


def test_where_no_group_keeps_below_the_mean_the_one_whose_busiest_rank_stays_lowest_is_taken() -> None:
    """D9: of 6 heads on 4 ranks some ranks have two, so the long sequence passes the mean work on every level."""
    shape = ModelShape("llama", 4, 48, 6, 2, 32, 96, 259)
    plan = NspPlanner(TREE, shape, 8192).plan(SequenceBatch.of_lengths([5200, 700, 500, 420, 300, 180]))
    degree = {s: p.group.degree for _, p in plan.placements() for s in p.sequences}
    assert degree == {0: 4, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}


def test_longest_first_keeps_equal_lengths_in_order() -> None:
    assert longest_first(SequenceBatch.of_lengths([3, 5, 3, 5, 9])) == [4, 1, 3, 0, 2]


def test_the_smallest_fitting_level_is_none_when_all_ranks_are_too_few() -> None:
    assert [smallest_fitting_level(TREE, 10, n) for n in (1, 10, 11, 20, 21, 40, 41)] == [2, 2, 1, 1, 0, 0, None]


def test_check_lengths_names_the_longest_by_the_name_it_was_given() -> None:
    check_lengths(TREE, 10, [], [])
    check_lengths(TREE, 10, [5, 6], [1, 40])
    with pytest.raises(InfeasibleError, match="sequence 6 "):
        check_lengths(TREE, 10, [5, 6, 7], [1, 48, 41])
    with pytest.raises(InfeasibleError, match="on each of 1 rank, "):
        check_lengths(GroupTree(()), 10, [5], [11])
