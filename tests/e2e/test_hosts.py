"""Two hosts as two network namespaces of this machine, joined by torchrun's rendezvous over a wire that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.e2e.commands import TIMEOUT_S, TORCHRUN, ranks_of, run, started, wait_until
from tests.e2e.runs import losses, read_plans, write_run

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="only root makes network namespaces, with the ip command",
)
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two new namespaces whose ``eth0`` are the two ends of one wire; they end with their processes."""
    names = tuple(f"nestsp-{os.getpid()}-{number}" for number in range(2))
    wires = tuple(f"nsp{os.getpid()}.{number}" for number in range(2))  # at most 15 letters
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for name, wire, address in zip(names, wires, ADDRESSES, strict=True):
            ip("link", "set", wire, "netns", name, "name", "eth0")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    finally:
        for name in made:
            ip("netns", "delete", name)


def host_of(
    folder: Path, hosts: Sequence[str], number: int, num_hosts: str, *settings: str, restarts: int = 0
) -> AbstractContextManager[subprocess.Popen[str]]:
    """torchrun on one of the hosts, with one rank; the first one has the rendezvous.

    Args:
        num_hosts: As torchrun takes it, such as 1:2.
    """
    return started(
        folder, "--nnodes", num_hosts, "--nproc-per-node", "1", "--max-restarts", str(restarts),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-id", "tiny",
        "--local-addr", ADDRESSES[number], "--rdzv-conf",
        f"is_host={int(number == 0)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3",
        "-m", "nestsp", "train", "tiny.yaml", "--set", "cluster.ranks=1", "--set", "train.stall_s=4",
        "--set", "planner.max_tokens_per_rank=200", *settings,
        program=("ip", "netns", "exec", hosts[number], "env", "GLOO_SOCKET_IFNAME=eth0", *TORCHRUN),
    )  # fmt: skip


def wait_while_it_runs(process: subprocess.Popen[str], condition: Callable[[], bool], what: str) -> None:
    def holds() -> bool:
        assert process.poll() is None, process.communicate()
        return condition()

    wait_until(holds, what)


def ranks_by_step(run: Path) -> list[int]:
    """Of each step, how many ranks its plan was for."""
    return [plan.tree.num_ranks for plan in read_plans(run)]


def test_two_hosts_train_and_when_one_vanishes_the_ranks_of_both_say_so_and_end(tmp_path: Path) -> None:
    """F14: no connection is closed, so nothing but the watchdog notices."""
    write_run(tmp_path)

    with two_hosts() as hosts:
        # Without saves: a rank that is saving waits as long as a save may take.
        settings = ("--set", "train.steps=100000", "--set", "train.checkpoint_every=null")
        with (
            host_of(tmp_path, hosts, 0, "2", *settings) as first,
            host_of(tmp_path, hosts, 1, "2", *settings) as second,
        ):
            metrics = tmp_path / "runs" / "tiny-1" / "metrics.jsonl"
            wait_while_it_runs(first, lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "two steps")
            ip("-n", hosts[1], "link", "set", "eth0", "down")
            errors = [first.communicate(timeout=TIMEOUT_S)[1]]
            assert first.returncode == 1
            # The other's torchrun waits on for the rendezvous of the host that it has lost; its rank does not.
            wait_until(lambda: not ranks_of(second.pid), "the other host's rank has ended")
            second.kill()
            errors.append(second.communicate(timeout=TIMEOUT_S)[1])
    for rank, said in enumerate(errors):
        lines = said.splitlines()
        assert any("has stopped: a rank has not moved for train.stall_s = 4 seconds" in line for line in lines), said
        assert f"[rank {1 - rank}] gives no answer: its process is stopped, or hangs where Python cannot run" in lines
    assert len(losses(tmp_path / "runs" / "tiny-1")) >= 2


# Far apart, so that the wire is cut between two saves.
ELASTIC = ("--set", "train.steps=40", "--set", "train.checkpoint_every=15", "--set", "train.export=false")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one rank, that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_run(folder)
    settings = ("--set", "cluster.ranks=1", "--set", "planner.max_tokens_per_rank=200", *ELASTIC)
    assert run(folder, "train", "tiny.yaml", *settings, "--set", "train.checkpoint_every=null").code == 0
    return folder / "runs" / "tiny-1"


def compare(ours: Path, undisturbed: Path) -> None:
    """Every sample in its step, none left out and none twice; and what was learnt from them."""
    assert [path.name for path in ours.parent.iterdir()] == [ours.name]
    batches, expected = ([plan.batch for plan in read_plans(folder)] for folder in (ours, undisturbed))
    assert batches == expected
    assert losses(ours) == pytest.approx(losses(undisturbed), rel=1e-4)  # float32, 40 updates, other sums


def test_a_host_that_vanishes_leaves_the_other_to_go_on_from_the_last_checkpoint(
    undisturbed: Path, tmp_path: Path
) -> None:
    """F14: torchrun's ``--nnodes 1:2``."""
    write_run(tmp_path)
    ours = tmp_path / "runs" / "tiny-1"
    with (
        two_hosts() as hosts,
        host_of(tmp_path, hosts, 0, "1:2", *ELASTIC, restarts=2) as first,
        host_of(tmp_path, hosts, 1, "1:2", *ELASTIC, restarts=2) as second,
    ):
        wait_while_it_runs(first, (ours / "checkpoints" / "step-000015").exists, "a whole checkpoint")
        ip("-n", hosts[1], "link", "set", "eth0", "down")
        _, err = first.communicate(timeout=TIMEOUT_S)
        assert first.returncode == 0, err
        second.kill()
    ranks = ranks_by_step(ours)
    assert (ranks[14], ranks[-1]) == (2, 1)
    assert sorted(ranks, reverse=True) == ranks
    compare(ours, undisturbed)
