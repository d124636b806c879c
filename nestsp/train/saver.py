"""Saves beside training: the state is copied between two steps, and written by a thread while the next ones run.

Price: the seconds of the copy, 12 bytes of host memory a parameter over all ranks, and the cores that write. One save
is under way at a time; the next one waits for it. What a save has come to is the same on all ranks, and known to each
by its own clock; the trainer asks for it at a step's end that all ranks have agreed on.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nestsp.train.checkpoint import save_checkpoint
from nestsp.train.manifest import Progress, RunIdentity
from nestsp.train.run_state import RunState, Staging, run_state
from nestsp.train.world import World

__all__ = ["Saver"]


class Saver:
    """The checkpoints of one run. Every rank makes one, and calls each method at the same step.

    Attributes:
        checkpoint: The last one that is known to be whole.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        root: nn.Module,
        optimizer: torch.optim.Optimizer,
        identity: RunIdentity,
        *,
        model: str,
        keep: int | None,
        background: bool,
        timeout_s: float,
    ) -> None:
        self._folder, self._root, self._optimizer, self._identity = folder, root, optimizer, identity
        self._model, self._keep = model, keep
        self._world = world
        # The thread's collectives must not meet the step's.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if background else world.control
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._staging = Staging() if background else None
        self._thread = ThreadPoolExecutor(1, "saver", self._enter_thread) if background else None
        self._running: Future[Path] | None = None
        self._wait_s = 0.0
        self.checkpoint: Path | None = None

    def begin(self, progress: Progress) -> None:
        """Save a step; in the background, return once the state is copied and the save before it has ended.

        Raises:
            CheckpointError: This save, or in the background the one before it, failed; on every rank.
        """
        self.finish()
        begun = time.perf_counter()
        state = run_state(self._root, self._optimizer, progress)
        if self._thread is None or self._staging is None:
            self.checkpoint = self._save(state)
        else:
            self._running = self._thread.submit(self._save, self._staging.copy(state))
        self._wait_s += time.perf_counter() - begun

    @property
    def ended(self) -> bool:
        """Whether a save that was begun has ended on this rank and was not asked for yet."""
        return self._running is not None and self._running.done()

    def finish(self) -> None:
        """Wait for the save that is under way, if any.

        Raises:
            CheckpointError: It failed; on every rank.
        """
        if self._running is not None:
            begun = time.perf_counter()
            running, self._running = self._running, None
            self.checkpoint = running.result()
            self._wait_s += time.perf_counter() - begun

    def take_wait_s(self) -> float:
        """Seconds that training has waited for saves since the last call."""
        waited_s, self._wait_s = self._wait_s, 0.0
        return waited_s

    def close(self) -> None:
        """End the thread; no save may be under way."""
        if self._thread is not None:
            self._thread.shutdown()
            dist.destroy_process_group(self._group)

    def _save(self, state: RunState) -> Path:
        return save_checkpoint(
            self._folder, state, self._identity, control_group=self._group, model=self._model, keep=self._keep
        )

    def _enter_thread(self) -> None:
        if self._world.device.type == "cuda":  # else DCP would open a context on the first GPU, on every rank
            torch.cuda.set_device(self._world.device)
