"""``nestsp verify`` of a model that is wrong: the planned step counts every target twice. Run by torchrun."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from nestsp.cli.main import main
from nestsp.execute import executor
from nestsp.execute.local import load_local


def load_doubled(*args: Any, **kwargs: Any) -> Any:
    """The tokens of a rank, with weights of 2."""
    tokens = load_local(*args, **kwargs)
    tokens.weights.mul_(2)
    return tokens


if __name__ == "__main__":
    with patch.object(executor, "load_local", load_doubled):
        main()
