"""``nestsp train`` of which one rank fails in its second step, for a reason of its own. Run by torchrun or as it is."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

from nestsp.cli.main import main
from nestsp.train import trainer
from nestsp.train.update import update

FAILING = 1


def fail(*args: Any, **kwargs: Any) -> float:
    """An update that goes wrong on one rank when it is called a second time."""
    seen.append(None)
    if len(seen) == 2 and os.environ["RANK"] == str(FAILING):
        raise RuntimeError("the second update of this rank fails")
    return update(*args, **kwargs)


seen: list[None] = []
if __name__ == "__main__":
    with patch.object(trainer, "update", fail):
        main()
