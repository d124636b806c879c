"""Two hosts as two network namespaces of this machine, joined by torchrun's rendezvous over a wire that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.commands import TIMEOUT_S, TORCHRUN, ranks_of, started, wait_until
from tests.e2e.runs import losses, write_run

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


def test_two_hosts_train_and_when_one_vanishes_the_ranks_of_both_say_so_and_end(tmp_path: Path) -> None:
    """F14: no connection is closed, so nothing but the watchdog notices."""
    write_run(tmp_path)

    def arguments(number: int) -> list[str]:
        return [
            "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-id", "tiny", "--local-addr", ADDRESSES[number],
            "--rdzv-conf", f"is_host={int(number == 0)}",
            "-m", "nestsp", "train", "tiny.yaml", "--set", "cluster.ranks=1", "--set", "train.stall_s=4",
            "--set", "planner.max_tokens_per_rank=100", "--set", "train.steps=100000",
        ]  # fmt: skip

    with two_hosts() as hosts:
        programs = [("ip", "netns", "exec", host, "env", "GLOO_SOCKET_IFNAME=eth0", *TORCHRUN) for host in hosts]
        with (
            started(tmp_path, *arguments(0), program=programs[0]) as first,
            started(tmp_path, *arguments(1), program=programs[1]) as second,
        ):
            metrics = tmp_path / "runs" / "tiny-1" / "metrics.jsonl"

            def has_trained() -> bool:
                assert first.poll() is None, first.communicate()
                return metrics.exists() and metrics.read_text().count("\n") >= 2

            wait_until(has_trained, "two steps")
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
