"""Keeps the commands of these tests from running beside each other: each starts several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TEST_TIMEOUT_S = 1200  # a command's own limit comes first


@pytest.hookimpl(tryfirst=True)  # xdist reads its groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_xdist = config.pluginmanager.hasplugin("xdist")
    for item in items:
        if HERE in item.path.parents:  # this hook sees the items of the whole session
            if has_xdist:
                item.add_marker(pytest.mark.xdist_group("commands"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
