"""No set of empty groups can make ranks wait for each other in a ring.

The ranks are modelled as the machine runs them: each takes its turns in order; a turn first waits for the exchange
before it, then puts its own on the wire; a rank's wire is a queue, in order; an exchange is done once it heads the
queue of every member of its group. The gather of the next layer's parameters is one of all ranks on the same wires, for
which that layer waits where it begins.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import given

from nestsp.batch import SequenceBatch
from nestsp.cluster import Group, GroupTree
from nestsp.plan import GatherTurns, Microbatch, Placement, Plan
from nestsp.schedule import Pass, Turn, make_schedule, num_exchanges
from tests.property.strategies import FANOUTS, KEEPS, plans

TurnsOf = Callable[[Plan, int, int, Pass], Sequence[Turn]]  # plan, microbatch, rank, pass
GatherOf = Callable[[Plan, int, int, Pass], int]  # the turns of such that come before the gather
Exchange = tuple[int, Group, int]  # stage, group, number
_BACK = (Pass.RECOMPUTE, Pass.BACKWARD)
_LAYERS = ((Pass.FORWARD,), (Pass.FORWARD,), _BACK, _BACK)
_GATHER = -1


def in_schedule_order(plan: Plan, microbatch: int, rank: int, which: Pass) -> Sequence[Turn]:
    """The turns as `Schedule` orders them."""
    return make_schedule(plan).turns(microbatch, rank, which)


def in_schedule_order_without_streaming(plan: Plan, microbatch: int, rank: int, which: Pass) -> Sequence[Turn]:
    """Each group takes all its turns before the next one's first."""
    return make_schedule(plan, streaming=False).turns(microbatch, rank, which)


def gathers_of_the_schedule(plan: Plan, microbatch: int, rank: int, which: Pass) -> int:
    """As `Schedule` says, of turns as it orders them."""
    return make_schedule(plan).turns_before_gather(microbatch, rank, which)


def gathers_without_streaming(plan: Plan, microbatch: int, rank: int, which: Pass) -> int:
    """The same where each group takes all its turns before the next one's first."""
    return make_schedule(plan, streaming=False).turns_before_gather(microbatch, rank, which)


def gathers_after_so_many_turns_of_its_own(plan: Plan, microbatch: int, rank: int, which: Pass) -> int:
    """A mutant: each rank counts its own turns alone."""
    gathers = plan.gathers
    number = gathers.forward if which is Pass.FORWARD else gathers.backward
    return min(number, len(make_schedule(plan).turns(microbatch, rank, which)))


def in_order_of_readiness(plan: Plan, microbatch: int, rank: int, which: Pass) -> Sequence[Turn]:
    """A mutant: each rank has its own luck in which group is ready first; each group's own turns stay in order."""
    turns = list(in_schedule_order(plan, microbatch, rank, which))
    levels = [turn.level for turn in turns]
    random.Random(f"{microbatch} {rank} {which} {levels}").shuffle(levels)
    own = {level: deque(turn for turn in turns if turn.level == level) for level in levels}
    return [own[level].popleft() for level in levels]


def in_each_ranks_own_level_order(plan: Plan, microbatch: int, rank: int, which: Pass) -> Sequence[Turn]:
    """A mutant: the order of levels is not the same on all ranks."""
    order = plan.level_order if rank % 2 else tuple(reversed(plan.level_order))
    return make_schedule(replace(plan, level_order=order)).turns(microbatch, rank, which)


def finishes(plan: Plan, turns_of: TurnsOf, gather_of: GatherOf = gathers_of_the_schedule) -> bool:
    """Whether all ranks come to the end of two layers, forward and backward, of all microbatches."""
    stages = [(m, passes) for m in range(len(plan.microbatches)) for passes in _LAYERS]
    everyone = plan.tree.group(0, 0)
    programs: list[deque[tuple[str, Exchange]]] = []
    for rank in range(plan.tree.num_ranks):
        program: deque[tuple[str, Exchange]] = deque()
        for stage, (microbatch, passes) in enumerate(stages):
            if stage:
                program.append(("wait", (stage - 1, everyone, _GATHER)))
            gather = ("issue", (stage, everyone, _GATHER))
            before = gather_of(plan, microbatch, rank, passes[-1])
            if not before:
                program.append(gather)
            for which in passes:
                stage_of_pass = stage * len(Pass) + list(Pass).index(which)
                exchanges = {
                    p.group.level: num_exchanges(p, which) for p in plan.microbatches[microbatch].on_rank(rank)
                }
                for taken, turn in enumerate(turns_of(plan, microbatch, rank, which), 1):
                    group = plan.tree.group(turn.level, rank)
                    if turn.number > 0:
                        program.append(("wait", (stage_of_pass, group, turn.number - 1)))
                    if turn.number < exchanges[turn.level]:
                        program.append(("issue", (stage_of_pass, group, turn.number)))
                    if which is passes[-1] and taken == before:
                        program.append(gather)
        programs.append(program)

    wires: list[deque[Exchange]] = [deque() for _ in programs]
    done: set[Exchange] = set()
    moved = True
    while moved:
        moved = False
        for program, wire in zip(programs, wires, strict=True):
            while program and (program[0][0] == "issue" or program[0][1] in done):
                verb, exchange = program.popleft()
                moved = True
                if verb == "issue":
                    wire.append(exchange)
        for wire in wires:
            while wire and all(wires[r] and wires[r][0] == wire[0] for r in wire[0][1].ranks):
                exchange = wire[0]
                for rank in exchange[1].ranks:
                    wires[rank].popleft()
                done.add(exchange)
                moved = True
    return not any(programs) and not any(wires)


@given(plans(max_ranks=16))
def test_no_plan_deadlocks_in_the_order_of_the_schedule(plan: Plan) -> None:
    """F10, D5: uneven shards, empty groups, rings and hybrids, kept outputs and any order of levels never hang."""
    assert finishes(plan, in_schedule_order)
    assert finishes(plan, in_schedule_order_without_streaming, gathers_without_streaming)


def test_five_hundred_plans_with_random_empty_groups_do_not_deadlock_and_all_mutants_are_caught() -> None:
    """F10, D5: the same check, on plans that use several levels at once, finds the orders that do hang."""
    caught = {in_order_of_readiness: 0, in_each_ranks_own_level_order: 0, gathers_after_so_many_turns_of_its_own: 0}
    for seed in range(500):
        plan = _busy_plan(random.Random(seed))
        assert finishes(plan, in_schedule_order), seed
        assert finishes(plan, in_schedule_order_without_streaming, gathers_without_streaming), seed
        if seed < 100:
            for mutant in (in_order_of_readiness, in_each_ranks_own_level_order):
                caught[mutant] += not finishes(plan, mutant)
            gathers = gathers_after_so_many_turns_of_its_own
            caught[gathers] += not finishes(plan, in_schedule_order, gathers)
    assert all(count > 10 for count in caught.values()), caught


def _busy_plan(rng: random.Random) -> Plan:
    """Each group of a small tree is used with probability 0.6 and one sequence."""
    tree = GroupTree(rng.choice([f for f in FANOUTS if 4 <= GroupTree(f).num_ranks <= 12]))
    groups = [g for level in range(tree.num_levels) for g in tree.groups(level) if rng.random() < 0.6]
    rings = [[d for d in range(1, g.degree + 1) if g.degree % d == 0] for g in groups]
    placements = tuple(
        Placement(g, (i,), rng.choice(degrees), rng.choice(KEEPS))
        for i, (g, degrees) in enumerate(zip(groups, rings, strict=True))
    )
    levels = list(range(tree.num_levels))
    rng.shuffle(levels)
    batch = SequenceBatch.of_lengths([rng.randrange(1, 20) for _ in groups])
    gathers = GatherTurns(rng.randrange(6), rng.randrange(6), rng.randrange(tree.num_levels + 1))
    plan = Plan(tree, batch, (Microbatch(placements),), tuple(levels), "busy", gathers)
    plan.check()
    return plan


@given(plans(max_ranks=16))
def test_every_group_takes_each_of_its_turns_once_and_in_order_on_every_rank(plan: Plan) -> None:
    for which in Pass:
        for number, microbatch in enumerate(plan.microbatches):
            for rank in range(plan.tree.num_ranks):
                turns = make_schedule(plan).turns(number, rank, which)
                for placement in microbatch.on_rank(rank):
                    own = [turn.number for turn in turns if turn.level == placement.group.level]
                    assert own == list(range(num_exchanges(placement, which) + 1))
                assert {turn.level for turn in turns} == {p.group.level for p in microbatch.on_rank(rank)}


@given(plans(max_ranks=16))
def test_turns_that_open_an_exchange_come_before_all_others(plan: Plan) -> None:
    """The first autograd node takes a prefix of the turns, the second the rest."""
    for which in Pass:
        for number in range(len(plan.microbatches)):
            for rank in range(plan.tree.num_ranks):
                opens = [turn.opens for turn in make_schedule(plan).turns(number, rank, which)]
                assert opens == sorted(opens, reverse=True)


@given(plans(max_ranks=16))
def test_a_gather_comes_right_after_an_exchange_of_its_links_or_where_the_layer_begins(plan: Plan) -> None:
    """Right after the last that comes before its place: so no rank holds it up for anything else."""
    gathers = plan.gathers
    for which, before in ((Pass.FORWARD, gathers.forward), (Pass.BACKWARD, gathers.backward)):
        for number, microbatch in enumerate(plan.microbatches):
            for rank in range(plan.tree.num_ranks):
                exchanges = {p.group.level: num_exchanges(p, which) for p in microbatch.on_rank(rank)}
                turns = make_schedule(plan).turns(number, rank, which)
                taken = make_schedule(plan).turns_before_gather(number, rank, which)
                issuing = [
                    turn.level < gathers.num_levels and turn.number < exchanges[turn.level] and turn.number < before
                    for turn in turns
                ]
                assert not any(issuing[taken:])
                assert taken == 0 or issuing[taken - 1]
