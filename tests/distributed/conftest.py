"""Gives distributed tests their pool, one for each xdist worker, and keeps a file's tests on one worker.

Ranks that wait for each other leave cores idle: two files at a time on two cores take half the time of one after the
other. A file is a unit because its fixtures are runs.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .pool import RankPool

HERE = Path(__file__).parent
# A test may start the pool and run several times. The pool's own limit, 60 s a run, must come
# first: it shows the ranks' stacks.
TEST_TIMEOUT_S = 300


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "distributed: runs on several gloo ranks (tests/distributed)")


@pytest.hookimpl(tryfirst=True)  # xdist reads its groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_xdist = config.pluginmanager.hasplugin("xdist")
    has_timeout = config.pluginmanager.hasplugin("timeout")
    for item in items:
        if HERE not in item.path.parents:  # this hook sees the items of the whole session
            continue
        item.add_marker(pytest.mark.distributed)
        if has_xdist:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if has_timeout and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
