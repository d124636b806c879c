from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import torch

from nestsp.comm.groups import Link, let_computation_wait


def link(stream: Any) -> Link:
    return Link(None, 2, stream)  # type: ignore[arg-type]


def test_computation_waits_once_for_each_link_class_and_on_cpus_for_none() -> None:
    network, inside, current = Mock(), Mock(), Mock()
    with patch.object(torch.cuda, "current_stream", return_value=current):
        let_computation_wait({0: link(network), 1: link(network), 2: link(inside)})
        assert {call.args for call in current.wait_stream.call_args_list} == {(network,), (inside,)}
        assert current.wait_stream.call_count == 2
    with patch.object(torch.cuda, "current_stream", side_effect=AssertionError):
        let_computation_wait({0: link(None)})
