"""``nestsp train`` of which one rank comes to harm in its first attempt. Run by torchrun.

Arguments: the trouble, then those of nestsp. Troubles: ``none``; ``die:RANK:N``, killed in its n-th update;
``die-saving:RANK:N``, killed when it has written its own part of the n-th checkpoint; ``sleep:RANK:N``, which never
comes back from its n-th update; ``stop:RANK:N``, stopped in it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from nestsp.cli.main import main
from nestsp.train import checkpoint, trainer
from nestsp.train.folders import crc32_of
from nestsp.train.update import update


def troubled(function: Callable[..., Any], number: int, trouble: Callable[[], None]) -> Callable[..., Any]:
    """A function that comes to harm when it is called for the n-th time."""
    calls: list[None] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            trouble()
        return function(*args, **kwargs)

    return run


def die() -> None:
    """As the kernel ends a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """As a debugger or a scheduler stops a process: no thread of it runs any more."""
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_for_ever() -> None:
    """Hang where Python can still run other threads."""
    while True:
        time.sleep(1)


if __name__ == "__main__":
    kind, _, rest = sys.argv.pop(1).partition(":")
    rank, _, number = rest.partition(":")
    mine = kind != "none" and os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not mine:
        main()
    elif kind == "die-saving":
        with patch.object(checkpoint, "crc32_of", troubled(crc32_of, int(number), die)):
            main()
    else:
        trouble = {"die": die, "sleep": sleep_for_ever, "stop": stop}[kind]
        with patch.object(trainer, "update", troubled(update, int(number), trouble)):
            main()
