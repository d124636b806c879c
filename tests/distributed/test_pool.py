"""What the other distributed tests rely on: a failure is told as it was, and the pool works on."""

import multiprocessing
import os
import signal
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from .pool import RankError, RankPool, RankTimeout

# Wall time is not tested (shared machine), only that a run ended long before its timeout.
LONG_S = 120.0
NOTICED_S = 60.0


def whoami(rank: int, num_ranks: int) -> tuple[int, int, int]:
    return rank, num_ranks, dist.get_rank()


def process_id(rank: int, num_ranks: int) -> int:
    return os.getpid()


def exchange(rank: int, num_ranks: int) -> tuple[float, list[float]]:
    """Sums the ranks; sends r + 1 copies of 10 * rank + r to each rank r."""
    total = torch.tensor(float(rank), dtype=torch.float64)
    dist.all_reduce(total)
    send = torch.cat([torch.full((r + 1,), 10.0 * rank + r) for r in range(num_ranks)])
    receive = torch.empty(num_ranks * (rank + 1))
    dist.all_to_all_single(receive, send, [rank + 1] * num_ranks, [r + 1 for r in range(num_ranks)])
    return total.item(), receive.tolist()


def scale(rank: int, num_ranks: int, x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor * rank


def raise_on_one(rank: int, num_ranks: int, bad_rank: int) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == bad_rank:
        print("about to raise")
        raise ValueError(f"rank {rank} has had enough")
    dist.all_reduce(torch.ones(1))


def raise_on_all(rank: int, num_ranks: int) -> None:
    dist.all_reduce(torch.ones(1))
    raise ValueError(f"plan is refused on rank {rank}")


def hang_on_one(rank: int, num_ranks: int, bad_rank: int) -> None:
    if rank == bad_rank:
        sleep_forever()
    dist.all_reduce(torch.ones(1))


def sleep_forever() -> None:
    time.sleep(3600)


def raise_on_one_while_others_sleep(rank: int, num_ranks: int) -> None:
    if rank == 1:
        raise ValueError("alone")
    sleep_forever()


def end_on_one(rank: int, num_ranks: int, bad_rank: int, how: str) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == bad_rank:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def warn(rank: int, num_ranks: int) -> None:
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def print_something(rank: int, num_ranks: int) -> None:
    print(f"hello from {rank}")
    print("and an error", file=sys.stderr)


def start_a_process(rank: int, num_ranks: int) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    process.start()
    process.join()
    return process.exitcode


def change_defaults(rank: int, num_ranks: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)


def default_dtype_and_random(rank: int, num_ranks: int) -> tuple[str, float]:
    return str(torch.get_default_dtype()), torch.rand(1).item()


def train_with_fsdp2(rank: int, num_ranks: int) -> float:
    """Two steps of a tiny Qwen3-MoE in bfloat16 with recomputation; the last loss."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config)
    model.activation_checkpointing_enable()
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units = [fully_shard(unit, mp_policy=policy) for unit in (*model.model.layers, model)]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(0, 64, (1, 8 + rank))
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def assert_works(pool: RankPool) -> None:
    assert pool.run(whoami, ranks=4) == [(r, 4, r) for r in range(4)]


def test_results_come_in_rank_order(pool: RankPool) -> None:
    assert_works(pool)


def test_arguments_and_results_may_be_tensors(pool: RankPool) -> None:
    x = torch.arange(3.0)
    results = pool.run(scale, x, 2.0, ranks=3)
    assert [r.tolist() for r in results] == [(x * 2.0 * rank).tolist() for rank in range(3)]


def test_worlds_of_every_size_work_one_after_another_in_the_same_processes(pool: RankPool) -> None:
    pids = pool.run(process_id, ranks=6)
    for num_ranks in (1, 2, 3, 4, 6, 4):
        results = pool.run(exchange, ranks=num_ranks)
        for rank, (total, received) in enumerate(results):
            assert total == num_ranks * (num_ranks - 1) / 2
            assert received == [10.0 * r + rank for r in range(num_ranks) for _ in range(rank + 1)]
    assert pool.run(process_id, ranks=6) == pids


def test_an_exception_names_the_rank_that_failed_first_and_the_pool_works_afterwards(
    pool: RankPool,
) -> None:
    for bad_rank in (2, 0):
        with pytest.raises(RankError) as caught:
            pool.run(raise_on_one, bad_rank, ranks=4, timeout_s=LONG_S)
        error = caught.value
        assert error.rank == bad_rank
        assert error.exceptions[bad_rank].type_name == "ValueError"
        assert error.exceptions[bad_rank].message == f"rank {bad_rank} has had enough"
        assert 'raise ValueError(f"rank {rank} has had enough")' in error.exceptions[bad_rank].traceback
        text = str(error)
        assert text.startswith(f"rank {bad_rank} raised ValueError: rank {bad_rank} has had enough")
        assert "about to raise" in text
        # The neighbours noticed by themselves; none had to be killed.
        assert sorted(error.exceptions) == [0, 1, 2, 3]
        assert_works(pool)


def test_an_exception_does_not_wait_for_ranks_that_hear_nothing(pool: RankPool) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError: alone") as caught:
        pool.run(raise_on_one_while_others_sleep, ranks=3, timeout_s=LONG_S)
    assert time.monotonic() - start_s < NOTICED_S
    assert list(caught.value.exceptions) == [1]
    assert str(caught.value).count("in sleep_forever") == 2
    assert_works(pool)


def test_all_ranks_raising_the_same_is_reported_for_all_and_keeps_the_processes(
    pool: RankPool,
) -> None:
    pids = pool.run(process_id, ranks=4)
    with pytest.raises(RankError) as caught:
        pool.run(raise_on_all, ranks=4)
    for rank in range(4):
        failure = caught.value.exceptions[rank]
        assert (failure.type_name, failure.message) == (
            "ValueError",
            f"plan is refused on rank {rank}",
        )
    assert pool.run(process_id, ranks=4) == pids


def test_a_hang_prints_the_stack_of_every_rank_and_the_pool_works_afterwards(
    pool: RankPool,
) -> None:
    with pytest.raises(RankTimeout) as caught:
        pool.run(hang_on_one, 1, ranks=3, timeout_s=2.0)
    assert "in sleep_forever" in caught.value.stacks[1]
    for rank in (0, 2):
        assert "in all_reduce" in caught.value.stacks[rank]
    text = str(caught.value)
    assert text.startswith("hang_on_one on 3 ranks ran longer than 2 s")
    for rank in range(3):
        assert f"rank {rank}, still busy:\n{caught.value.stacks[rank].rstrip()}" in text
    assert_works(pool)


@pytest.mark.parametrize(("how", "words"), [("exit", "exit code 3"), ("kill", "ended by signal 9")])
def test_an_ended_rank_is_noticed_quickly_and_the_pool_works_afterwards(pool: RankPool, how: str, words: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(end_on_one, 2, how, ranks=4, timeout_s=LONG_S)
    assert time.monotonic() - start_s < NOTICED_S
    assert caught.value.rank == 2
    assert str(caught.value).startswith(f"rank 2 {words}")
    assert_works(pool)


def test_a_rank_that_ended_between_runs_is_replaced(pool: RankPool) -> None:
    pids = pool.run(process_id, ranks=2)
    os.kill(pids[1], signal.SIGKILL)
    pool._workers[1].process.join()
    assert_works(pool)


def test_a_warning_in_a_rank_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank [01] raised DeprecationWarning: old"):
        pool.run(warn, ranks=2)


def test_what_ranks_print_is_shown_by_rank(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(print_something, ranks=2)
    assert capsys.readouterr().out == "".join(f"[rank {rank}] hello from {rank}\nand an error\n" for rank in range(2))


def test_every_run_starts_from_the_same_defaults(pool: RankPool) -> None:
    expected = pool.run(default_dtype_and_random, ranks=1)
    pool.run(change_defaults, ranks=1)
    assert pool.run(default_dtype_and_random, ranks=1) == expected
    assert expected[0][0] == "torch.float32"


def test_a_rank_may_start_a_process(pool: RankPool) -> None:
    assert pool.run(start_a_process, ranks=1) == [0]


def test_fsdp2_trains_run_after_run_in_the_same_processes(pool: RankPool) -> None:
    pids = pool.run(process_id, ranks=2)
    losses = pool.run(train_with_fsdp2, ranks=2)
    assert pool.run(train_with_fsdp2, ranks=2) == losses
    assert pool.run(process_id, ranks=2) == pids


def test_a_function_that_ranks_cannot_import_is_refused(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="move it to the top level"):
        pool.run(lambda rank, num_ranks: None, ranks=1)


def test_closing_ends_every_process() -> None:
    with RankPool(max_ranks=2) as own:
        own.run(process_id, ranks=2)
        processes = [worker.process for worker in own._workers]
    assert [process.exitcode for process in processes] == [0, 0]
