"""Finds where a number that is not finite came from: the step is run once more, with every layer watched.

A non-finite number spreads in microseconds: through attention to the ranks of a group, through reductions to all. What
counts is where it was first: microbatches and layers run in one order on all ranks, so the least place over all ranks
is its source. Price: one more step, once, before the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nestsp.execute.executor import Executor, LocalBatch
from nestsp.model.adapter import decoder_layers
from nestsp.train.world import World

__all__ = ["trace_nonfinite"]

_FORWARD, _BACKWARD, _PARAMETERS = 0, 1, 2


@dataclass(frozen=True, slots=True, order=True)
class _Finding:
    """Where one rank saw it; the least is the first: passes that only count or measure come before all others."""

    trains: bool
    microbatch: int
    which: int
    position: int
    what: str


def trace_nonfinite(
    executor: Executor, local: LocalBatch, run: Callable[[], object], world: World, folder: Path, step: int
) -> str:
    """Run a step again and say where it first has a number that is not finite; every rank must call it.

    The rank that saw it first leaves the tokens of that microbatch, and what went into the layer, in
    ``folder/nan-<step>-<rank>.safetensors``. Weights do not change; gradients are of no use afterwards.

    Args:
        executor: Of the run.
        local: The step's batch, as this rank ran it.
        run: Runs it as the step did, with its loss, from the same state.
        world: This rank.
        folder: The run's.
        step: For the file's name.

    Returns:
        Words that end a sentence, such as ``first seen on rank 3 in microbatch 2, in the output of layer 7``.
    """
    watch = _Watch(executor)
    try:
        run()
    finally:
        watch.remove()
    mine = min(watch.findings(), default=None)
    everyones = world.gather(mine)
    found = [(finding, rank) for rank, finding in enumerate(everyones) if finding is not None]
    if not found:
        return "when the step was run again, every number was finite, so the ranks' devices may not be sound"
    first, rank = min(found)
    path = folder / f"nan-{step:06d}-{rank}.safetensors"
    if rank == world.rank:
        tokens = local.microbatches[first.microbatch].tokens
        tensors = {name: getattr(tokens, name) for name in ("ids", "positions", "targets", "weights")}
        safetensors.torch.save_file({**tensors, **watch.inputs}, path)
    return f"first seen on rank {rank} in microbatch {first.microbatch + 1}, in {first.what}; its inputs are in {path}"


class _Watch:
    """Hooks on a model that note every layer whose output, or its gradient, is not finite."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._findings: list[_Finding] = []
        self.inputs: dict[str, Tensor] = {}
        layers = decoder_layers(executor.root)
        self._hooks = [
            layers[0].register_forward_pre_hook(
                lambda module, arguments: self._look(arguments, _FORWARD, -1, "the embedding of its tokens", ())
            ),
            executor.root.register_forward_hook(
                lambda module, arguments, loss: self._look((loss,), _FORWARD, len(layers), "its loss", ())
            ),
            *(layer.register_forward_hook(self._watch_layer(number)) for number, layer in enumerate(layers)),
        ]

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def findings(self) -> list[_Finding]:
        """All that were seen, the parameters' gradients included."""
        last = self._executor.place.microbatch
        for position, (name, parameter) in enumerate(self._executor.root.named_parameters()):
            gradient = parameter.grad
            if gradient is not None:
                shard = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                if not bool(shard.isfinite().all()):
                    what = f"the gradient of {name.removeprefix('model.')}, or after a microbatch before"
                    self._findings.append(_Finding(True, last, _PARAMETERS, position, what))
        return self._findings

    def _watch_layer(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, arguments: Any, output: Any) -> None:
            microbatch = self._executor.place.microbatch
            hidden: Tensor = output[0] if isinstance(output, tuple) else output
            self._look((hidden,), _FORWARD, number, f"the output of layer {number}", arguments[:1])
            if hidden.requires_grad:
                hidden.register_hook(
                    lambda gradient: self._look(
                        (gradient,), _BACKWARD, -number, f"the gradient of layer {number}'s output", (), microbatch
                    )
                )

        return look

    def _look(
        self,
        tensors: Sequence[Any],
        which: int,
        position: int,
        what: str,
        inputs: Sequence[Tensor],
        microbatch: int | None = None,
    ) -> None:
        tensor = tensors[0]
        assert isinstance(tensor, Tensor)
        if bool(torch.isfinite(tensor).all()):
            return
        number = self._executor.place.microbatch if microbatch is None else microbatch
        if not self._findings:
            for value in inputs:
                self.inputs["layer_input"] = value.detach().contiguous().clone()
        trains = which != _FORWARD or torch.is_grad_enabled()
        self._findings.append(_Finding(trains, number, which, position, what))
