"""The first tensors of a step: what one rank holds of one microbatch.

Targets are shifted here once, on whole sequences: a rank's last token may have its target on the next rank, and the
last token of each sequence has none. Each rank reads only the tokens of its own spans, and one more where a span ends
inside a sequence. A rank without tokens gets one filler token, which is in no group and has no target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestsp.batch import SequenceBatch
from nestsp.data.store import LabelledTokens
from nestsp.model.loss import IGNORED_TARGET
from nestsp.shard import Spans

__all__ = ["LocalTokens", "ReadTokens", "TokenLoss", "load_local", "weighted_sum"]

ReadTokens = Callable[[int, int, int], npt.NDArray[np.integer] | LabelledTokens]
"""(sequence id, start, stop) → its tokens start to stop - 1, with labels and weights where not all are targets."""


class LocalTokens:
    """Tokens of one rank in one microbatch. A plain class, so that FSDP's mixed precision passes it on untouched.

    Attributes:
        ids: int64 [T].
        positions: int64 [T], counted from each sequence's own start.
        targets: int64 [T], the next token of the same sequence; -100 where there is none.
        weights: float32 [T], of the targets.
        sequences: int64 [T], each token's sequence by its place in the batch; 0 for a filler, which has no target.
        num_tokens: Tokens held, filler excluded.
    """

    def __init__(
        self, ids: Tensor, positions: Tensor, targets: Tensor, weights: Tensor, sequences: Tensor, num_tokens: int
    ) -> None:
        self.ids = ids
        self.positions = positions
        self.targets = targets
        self.weights = weights
        self.sequences = sequences
        self.num_tokens = num_tokens


TokenLoss = Callable[[LocalTokens, Tensor], Tensor]
"""(tokens, their negative log-likelihoods [T]) → this rank's share of the loss, a scalar with a gradient."""


def weighted_sum(tokens: LocalTokens, nll_T: Tensor) -> Tensor:
    """The loss of plain training: Σ weight × negative log-likelihood."""
    return (nll_T * tokens.weights).sum()


def load_local(spans: Spans, batch: SequenceBatch, read: ReadTokens, device: torch.device) -> LocalTokens:
    """Read the tokens of a rank's spans.

    Args:
        spans: What the rank holds of a microbatch.
        batch: The sequences.
        read: Reads tokens from the store.
        device: Where the tensors go.
    """
    ids: list[npt.NDArray[np.int64]] = []
    positions: list[npt.NDArray[np.int64]] = []
    targets: list[npt.NDArray[np.int64]] = []
    weights: list[npt.NDArray[np.float32]] = []
    sequences: list[npt.NDArray[np.int64]] = []
    for span in spans.spans:
        length = batch.lengths[span.sequence]
        tokens, following, following_weights = _labelled(
            read(batch.ids[span.sequence], span.start, min(span.stop + 1, length))
        )
        ids.append(tokens[: span.num_tokens])
        positions.append(np.arange(span.start, span.stop, dtype=np.int64))
        if span.stop == length:
            following = np.append(following, IGNORED_TARGET)
            following_weights = np.append(following_weights, np.float32(1))
        targets.append(following)
        weights.append(following_weights)
        sequences.append(np.full(span.num_tokens, span.sequence, dtype=np.int64))
    columns = (_column(ids, 0), _column(positions, 0), _column(targets, IGNORED_TARGET))
    weight_column = torch.from_numpy(np.concatenate(weights) if weights else np.ones(1, np.float32))
    moved = [_to(tensor, device) for tensor in (*columns, weight_column, _column(sequences, 0))]
    return LocalTokens(moved[0], moved[1], moved[2], moved[3], moved[4], spans.num_tokens)


def _labelled(
    tokens: npt.NDArray[np.integer] | LabelledTokens,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Tokens, and the target and weight of all but the last; a token of weight 0 is no target."""
    if not isinstance(tokens, LabelledTokens):
        ids = np.asarray(tokens, dtype=np.int64)
        return ids, ids[1:], np.ones(max(len(ids) - 1, 0), dtype=np.float32)
    weights = tokens.weights[1:].astype(np.float32)
    targets = np.where(weights > 0, tokens.labels[1:].astype(np.int64), IGNORED_TARGET)
    return tokens.ids.astype(np.int64), targets, weights


def _column(parts: Sequence[npt.NDArray[np.int64]], filler: int) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.full(1, filler, np.int64))


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
