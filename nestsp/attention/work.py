"""One group of a microbatch as one of its ranks sees it, and what its attention leaves for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nestsp.attention.local import Mask, Segments
from nestsp.attention.merge import Rows
from nestsp.comm.exchange import Exchange
from nestsp.comm.groups import Link
from nestsp.plan import Keep
from nestsp.shape import HeadShare

__all__ = ["Attended", "Block", "GroupWork", "Kept", "Ring", "Saved", "meanwhile"]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Which of a member's queries see which keys of another member. None of the sequences is empty on either side.

    Attributes:
        queries: Rows of this member's queries.
        keys: Rows of the other one's keys.
        mask: The sequences of these queries on the same sequences of these keys.
    """

    queries: Rows
    keys: Rows
    mask: Mask


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """How a group's tokens lie around its ring.

    Attributes:
        place: This rank's member of the ring.
        num_tokens: Tokens of each member.
        blocks: For each member, what this one's queries see of its keys; None for this one itself, and where they see
            nothing.
    """

    place: int
    num_tokens: tuple[int, ...]
    blocks: tuple[Block | None, ...]

    @property
    def degree(self) -> int:
        """Members of the ring."""
        return len(self.num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class GroupWork:
    """One used group of a microbatch, as one of its ranks sees it.

    Its ranks are ``ring degree × heads degree``: adjacent ones exchange tokens for heads (*inside*), and each passes
    keys and values on to the rank at its own place in the next set.

    Attributes:
        level: Level of the group in its tree.
        link: Its process group; None for a group of one rank.
        member: This rank's place in the group.
        sizes: Tokens that each rank inside holds; some may hold none.
        rows: Where this rank's tokens of the group lie among all its tokens.
        segments: The sequences that the ranks inside hold together, ``sum(sizes)`` tokens: whole ones, or their own
            parts in a ring; none of them empty.
        heads: The heads of each rank inside.
        keep: What recomputation keeps: ``none``, or ``output``.
        ring: The ring; None for a ring of one.
        slices: Where the exchange of heads is cut in slices, the heads of each rank inside, for each slice; else empty.
        overlaps: The group's own attention runs while its exchanges travel; see `meanwhile`.
    """

    level: int
    link: Link | None
    member: int
    sizes: tuple[int, ...]
    rows: slice
    segments: Segments
    heads: tuple[HeadShare, ...]
    keep: Keep
    ring: Ring | None = None
    slices: tuple[tuple[HeadShare, ...], ...] = ()
    overlaps: bool = True

    @property
    def mask(self) -> Mask:
        """What the sequences that the ranks inside hold see of themselves."""
        return Mask.causal(self.segments)

    @property
    def place(self) -> int:
        """This rank's place inside."""
        return self.member % len(self.heads)

    @property
    def mine(self) -> HeadShare:
        """The heads that this rank works for."""
        return self.heads[self.place]

    @property
    def num_rows(self) -> int:
        """Tokens of the group that this rank holds."""
        return self.sizes[self.place]


def meanwhile(work: GroupWork, issue: Callable[[], Exchange], compute: Callable[[], None]) -> Exchange:
    """Put an exchange on the wire, and compute what does not need it.

    A group that does not overlap computes first: then the wait for the exchange hides behind nothing.
    """
    if work.overlaps:
        exchange = issue()
        compute()
        return exchange
    compute()
    return issue()


class Saved(NamedTuple):
    """What a group's backward pass needs.

    With ``keep == "none"`` these are in head layout (all tokens that the ranks inside hold, this rank's heads); with
    ``"output"`` q, k, v and out are in token layout (this rank's tokens, all heads), log-sum-exp in head layout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Kept(NamedTuple):
    """What a recompute finds of the forward pass: out in token layout, log-sum-exp in head layout."""

    out: Tensor
    lse: Tensor


class Attended(NamedTuple):
    """Result of a forward pass: this rank's rows of the output, and what backward needs."""

    out: Tensor
    saved: Saved
