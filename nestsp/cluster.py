"""The ranks and the tree of nested groups over them.

A tree is a laminar family: the root holds all ranks, each level splits every group into equal adjacent children, the
leaves are single ranks. Levels count from the root, so a group's *degree* (its number of ranks) falls as the level
rises. Only groups of the tree ever get a process group, which is ``1 + f0 + f0*f1 + ...`` of them at most and one per
level on any rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nestsp.errors import ConfigError

__all__ = ["Cluster", "Group", "GroupTree", "prime_factors", "ring_degrees", "share", "share_sizes"]

# More than any cluster has. Every plan holds numbers for each rank.
_MOST_RANKS = 1 << 20
# Digits of a number of hosts or ranks.
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """One vertex of a `GroupTree`: adjacent ranks that can share a sequence.

    Attributes:
        level: Distance from the root; 0 is the root.
        first_rank: Lowest rank of the group.
        degree: Number of ranks.
    """

    level: int
    first_rank: int
    degree: int

    @property
    def ranks(self) -> range:
        """The group's ranks, ascending."""
        return range(self.first_rank, self.first_rank + self.degree)

    def __contains__(self, rank: int) -> bool:
        return self.first_rank <= rank < self.first_rank + self.degree

    def __str__(self) -> str:
        last = self.first_rank + self.degree - 1
        return f"rank {self.first_rank}" if self.degree == 1 else f"ranks {self.first_rank}-{last}"


@dataclass(frozen=True, slots=True)
class GroupTree:
    """All groups that can hold a sequence.

    Attributes:
        fanouts: Children of a group at level 0, 1, ...; each at least 2. Empty for one rank.

    Raises:
        ConfigError: A fan-out is below 2.

    >>> tree = GroupTree((3, 2))
    >>> tree.num_ranks, tree.num_levels, [tree.degree(level) for level in range(3)]
    (6, 3, [6, 2, 1])
    >>> [str(group) for group in tree.path(3)]
    ['ranks 0-5', 'ranks 2-3', 'rank 3']
    """

    fanouts: tuple[int, ...]

    def __post_init__(self) -> None:
        for level, fanout in enumerate(self.fanouts):
            if not isinstance(fanout, int) or fanout < 2:
                raise ConfigError(
                    f"cluster.tree splits level {level} into {fanout}, but a group has at least 2 children; "
                    "remove that level"
                )

    @classmethod
    def parse(cls, text: str) -> GroupTree:
        """Read ``"2x2x3"`` (also with ``*`` or ``·``); ``"1"`` is one rank.

        Raises:
            ConfigError: The text is not such a product.
        """
        parts = re.split(r"[x*·]", text.strip())
        if not all(part.isdecimal() for part in parts):
            raise ConfigError(f"tree is {text!r}, but it must be fan-outs from the root down, such as 2x2x3")
        fanouts = tuple(int(part) for part in parts)
        return cls(()) if fanouts == (1,) else cls(fanouts)

    @property
    def num_ranks(self) -> int:
        """Ranks of the root, which are all ranks."""
        return math.prod(self.fanouts)

    @property
    def num_levels(self) -> int:
        """Levels, leaves included; a tree of one rank has one."""
        return len(self.fanouts) + 1

    def degree(self, level: int) -> int:
        """Ranks in each group of a level."""
        return math.prod(self.fanouts[level:])

    def level_of_degree(self, degree: int) -> int:
        """The level whose groups have this many ranks.

        Raises:
            ConfigError: No level has; the message lists those there are.
        """
        for level in range(self.num_levels):
            if self.degree(level) == degree:
                return level
        have = ", ".join(str(self.degree(level)) for level in reversed(range(self.num_levels)))
        raise ConfigError(f"the degree asked for is {degree}, but the tree {self} has only degrees {have}; take one")

    def group(self, level: int, rank: int) -> Group:
        """The group of a level that a rank belongs to."""
        degree = self.degree(level)
        return Group(level, rank - rank % degree, degree)

    def groups(self, level: int) -> tuple[Group, ...]:
        """All groups of a level, by rank."""
        degree = self.degree(level)
        return tuple(Group(level, first, degree) for first in range(0, self.num_ranks, degree))

    def path(self, rank: int) -> tuple[Group, ...]:
        """The groups a rank works for, root first, leaf last."""
        return tuple(self.group(level, rank) for level in range(self.num_levels))

    def __contains__(self, group: Group) -> bool:
        return (
            0 <= group.level < self.num_levels
            and group.degree == self.degree(group.level)
            and 0 <= group.first_rank < self.num_ranks
            and group.first_rank % group.degree == 0
        )

    def __str__(self) -> str:
        return "x".join(str(fanout) for fanout in self.fanouts) or "1"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts (machines) of equally many ranks, numbered host by host.

    >>> Cluster(6, 8).default_tree().fanouts
    (3, 2, 2, 2, 2)
    """

    num_hosts: int
    ranks_per_host: int

    def __post_init__(self) -> None:
        named = f"the cluster is {self.num_hosts:,}x{self.ranks_per_host:,}"
        if self.num_hosts < 1 or self.ranks_per_host < 1:
            raise ConfigError(f"{named}, but hosts and ranks of each must be at least 1; correct it")
        if self.num_ranks > _MOST_RANKS:
            raise ConfigError(
                f"{named}, which is {self.num_ranks:,} ranks, but at most {_MOST_RANKS:,} are planned for; take fewer"
            )

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read ``"8x8"``: hosts × ranks of each; ``"4"`` is one host.

        Raises:
            ConfigError: The text is not such a product.

        >>> Cluster.parse("8x4")
        Cluster(num_hosts=8, ranks_per_host=4)
        """
        parts = text.strip().split("x")
        numbers_only = all(part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS for part in parts)
        if len(parts) > 2 or not numbers_only:
            raise ConfigError(f"the cluster is {text!r}, but it must be hosts x ranks of each, such as 8x8")
        numbers = [int(part) for part in parts]
        return cls(*numbers) if len(numbers) == 2 else cls(1, numbers[0])

    @property
    def num_ranks(self) -> int:
        """Ranks of all hosts."""
        return self.num_hosts * self.ranks_per_host

    def default_tree(self) -> GroupTree:
        """The prime factors of the host count, largest first, then those of the ranks in a host."""
        return GroupTree(prime_factors(self.num_hosts) + prime_factors(self.ranks_per_host))

    def tree(self, fanouts: Sequence[int] | None) -> GroupTree:
        """The tree of the given fan-outs, or the default one.

        Raises:
            ConfigError: The fan-outs do not multiply to the number of ranks.
        """
        if fanouts is None:
            return self.default_tree()
        tree = GroupTree(tuple(fanouts))
        if tree.num_ranks != self.num_ranks:
            raise ConfigError(
                f"cluster.tree is {tree}, which is {tree.num_ranks} ranks, but the run has {self.num_ranks}; "
                f"give fan-outs whose product is {self.num_ranks}, leave it out for {self.default_tree()}, or set "
                "cluster.ranks to the ranks of each host"
            )
        return tree


def prime_factors(number: int) -> tuple[int, ...]:
    """Prime factors with multiplicity, largest first.

    >>> prime_factors(48), prime_factors(7), prime_factors(1)
    ((3, 2, 2, 2, 2), (7,), ())
    """
    factors: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1:
        factors.append(number)
    return tuple(reversed(factors))


def ring_degrees(degree: int) -> list[int]:
    """Members that the ring of a group may have: 1 is Ulysses alone, all of them a ring alone, others are hybrids.

    >>> ring_degrees(6)
    [1, 2, 3, 6]
    """
    return [ring for ring in range(1, degree + 1) if degree % ring == 0]


def share(total: int, num_parts: int, index: int) -> range:
    """Part ``index`` of ``num_parts`` of the numbers 0 to ``total - 1``: contiguous, sizes differing by at most 1.

    Tokens of a group's packed stream and heads of a model are dealt this way. A part may be empty.

    >>> [len(share(7, 4, index)) for index in range(4)], list(share(7, 4, 3))
    ([1, 2, 2, 2], [5, 6])
    """
    return range(total * index // num_parts, total * (index + 1) // num_parts)


def share_sizes(total: int, num_parts: int) -> tuple[int, ...]:
    """Sizes of all parts of `share`.

    >>> share_sizes(7, 4)
    (1, 2, 2, 2)
    """
    return tuple(len(share(total, num_parts, index)) for index in range(num_parts))
