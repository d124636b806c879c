"""What is known, and refused, before the first collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestsp.cluster import Cluster
from nestsp.errors import ConfigError, InfeasibleError, ModelError, NestspError
from nestsp.train.prepare import prepare
from tests.e2e.runs import tiny, write_corpus


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.jsonl")


@pytest.mark.parametrize("cap", [38, 64])
def test_a_cap_counts_what_a_rank_holds_after_splitting(cap: int) -> None:
    """G15: 150 tokens on four ranks are at most 38 on one."""
    assert prepare(tiny(f"planner.max_tokens_per_rank={cap}"), Cluster(1, 4)).tree.fanouts == (2, 2)
    with pytest.raises(InfeasibleError, match="needs 38 tokens on each of 4 ranks"):
        prepare(tiny("planner.max_tokens_per_rank=37"), Cluster(1, 4))


@pytest.mark.parametrize(("hosts", "ranks"), [(1, 1), (1, 2), (2, 2), (3, 4)])
def test_the_number_of_steps_does_not_depend_on_ranks(hosts: int, ranks: int) -> None:
    """G9."""
    config = tiny("planner.max_tokens_per_rank=150", "train.steps=null", "train.epochs=3")
    prepared = prepare(config, Cluster(hosts, ranks))
    assert prepared.num_steps == prepare(config, Cluster(1, 1)).num_steps == prepared.stream.num_steps(3)


@pytest.mark.parametrize(
    ("overrides", "kind", "sentence"),
    [
        (
            ["model.config.attention_dropout=0.1"],
            ModelError,
            "attention_dropout is 0.1, but nestsp runs none; set model.config.attention_dropout: 0",
        ),
        (
            ["model.config.router_jitter_noise=0.1"],
            ModelError,
            "router_jitter_noise is 0.1, but results must not depend on the plan; set it to 0",
        ),
        (
            ["model.config.max_position_embeddings=149"],
            ConfigError,
            "the longest sample has 150 tokens, but model.config.max_position_embeddings is 149; raise it, or set "
            "data.max_length",
        ),
        (
            ["model.config.vocab_size=255"],
            ConfigError,
            "model.config.vocab_size is 255, but the tokenizer 'bytes' has 256 tokens; raise it to at least that",
        ),
        (
            ["planner.degree=2"],
            ConfigError,
            "planner.degree is 2, but the nsp planner chooses degrees itself; leave it out, or take "
            "planner.name = static",
        ),
        (
            ["planner.name=static", "planner.degree=2", "planner.max_tokens_per_rank=74"],
            InfeasibleError,
            "the longest sequence has 150 tokens and needs 75 on each of planner.degree = 2 ranks, but "
            "planner.max_tokens_per_rank is 74; raise one of them, or set data.max_length",
        ),
        (
            ["planner.attention=ring", "model.config.use_sliding_window=true", "model.config.sliding_window=16"],
            ConfigError,
            "planner.attention is ring, but the model has layers with a sliding window of 16, which no ring runs; set "
            "it to auto or ulysses",
        ),
        (
            ["train.mlp_slice_tokens=8", "model.config.model_type=gpt_oss", "model.config.num_local_experts=4"],
            ModelError,
            "train.mlp_slice_tokens is set, but GptOssMLP returns a tuple instead of hidden states, which cannot be "
            "put together again; set it to null",
        ),
    ],
    ids=str.split("dropout window positions vocabulary nsp-degree static-degree ring-of-windows slices"),
)
def test_what_does_not_go_together_is_refused(overrides: list[str], kind: type[NestspError], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        prepare(tiny(*overrides), Cluster(1, 4))
    assert str(caught.value) == sentence
    assert type(caught.value) is kind


def test_a_planner_that_is_not_there_is_refused_before_the_store_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"planner\.name is 'nps'"):
        prepare(tiny("planner.name=nps"), Cluster(1, 4))
    assert not (tmp_path / ".nestsp").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((), "two samples each, but data.samples_together is 1; set it to 2"),
        (
            ("data.samples_together=2",),
            "but without train.sequence_loss the rejected ones would be taught, too; set it",
        ),
    ],
)
def test_A14_pairs_that_nothing_compares_are_refused(tmp_path: Path, overrides: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    with pytest.raises(ConfigError) as caught:
        prepare(tiny(*overrides), Cluster(1, 4))
    assert str(caught.value).startswith(
        "corpus.jsonl has rows of a chosen and a rejected answer, which are two samples"
    )
    assert sentence in str(caught.value)
