"""What a user does wrong is said in one sentence, with exit code 2, by one process, and harms no run folder.

The sentences are those a user reads: *subject is value, but rule; remedy.* What the ranks find is tested here once for
each place where it can be found, and in breadth by ``tests/distributed/test_trainer.py``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.commands import NESTSP, TORCHRUN, refusal, run
from tests.e2e.runs import write_run

TWO_RANKS = ("--set", "cluster.ranks=2", "--set", "planner.max_tokens_per_rank=100")


# --- Before any rank is started ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["train", "nowhere.yaml"],
            "ConfigError: the config is nowhere.yaml, but there is no such file; give the path of a run's YAML",
        ),
        (["train", "."], "ConfigError: the config is ., but that is a folder; give the path of a run's YAML"),
        (
            ["verify", "typo.yaml"],
            "ConfigError: typo.yaml: train.stpes is no setting; did you mean 'steps'?",
        ),
        (
            ["train", "tiny.yaml", "--set", "train.steps"],
            "ConfigError: --set got 'train.steps', but it must be section.key=value, such as train.steps=20",
        ),
        (
            ["train", "tiny.yaml", "--set", "data.source=missing.jsonl"],
            "DataError: data.source is 'missing.jsonl', but there is no such file or folder; give 'stdlib', a .jsonl "
            "or .parquet file, a folder, or a name on the Hub such as org/name",
        ),
        (
            ["train", "tiny.yaml", "--set", "data.source=empty.jsonl"],
            "DataError: data.source empty.jsonl has 1 documents and no token, but it needs at least one; give another "
            "source",
        ),
        (
            ["train", "tiny.yaml", "--set", "data.source=broken.jsonl"],
            "DataError: broken.jsonl, line 1, is not JSON at column 10 (Unterminated string starting at), but it must "
            "be; mend it",
        ),
        (
            ["train", "tiny.yaml", "--set", "data.max_length=3", "--set", "data.over_length=drop"],
            "DataError: the corpus has 12 documents (0 empty, 12 over 3 tokens and dropped), but no sample is left; "
            "raise data.max_length, or set data.over_length to truncate or split",
        ),
        (
            ["train", "tiny.yaml", "--set", "planner.max_tokens_per_rank=37"],
            "InfeasibleError: sequence 11 (150 tokens) needs 38 tokens on each of 4 ranks, but "
            "planner.max_tokens_per_rank is 37; raise it to 38, take 5 ranks, or set data.max_length",
        ),
        (
            ["train", "tiny.yaml", "--set", "cluster.tree=[2,3]"],
            "ConfigError: cluster.tree is 2x3, which is 6 ranks, but the run has 4; give fan-outs whose product is 4, "
            "leave it out for 2x2, or set cluster.ranks to the ranks of each host",
        ),
        (
            ["train", "tiny.yaml", "--set", "data.source=missing.jsonl", "--set", "cluster.profile=my.yaml"],
            "ConfigError: the cost profile is 'my.yaml', but the presets are a100-40g, a100-80g, a800, b200, cpu, "
            "h100, h20, h200, h800, and there is no such file; give its path from the folder you are in",
        ),
        (
            ["train", "tiny.yaml", "--set", "planner.name=nps"],
            "ConfigError: planner.name is 'nps', but the planners are static, batch-adaptive, basp, disjoint, flexsp, "
            "nsp; did you mean 'nsp'?",
        ),
        (
            ["train", "tiny.yaml", "--set", "planner.name=static", "--set", "planner.degree=3"],
            "ConfigError: the degree asked for is 3, but the tree 2x2 has only degrees 1, 2, 4; take one",
        ),
        (
            ["train", "tiny.yaml", "--set", "model.config.vocab_size=100"],
            "ConfigError: model.config.vocab_size is 100, but the tokenizer 'bytes' has 256 tokens; raise it to at "
            "least that",
        ),
        (
            ["verify", "tiny.yaml", "--set", "model.config.model_type=gpt2"],
            "ModelError: model.config.num_experts_per_tok is no key of a gpt2 config; did you mean "
            "'experts_per_token'?",
        ),
        (
            ["verify", "tiny.yaml", "--max-tokens", "0"],
            "ConfigError: --max-tokens is 0, but a batch with a target has at least 2 tokens; raise it",
        ),
        (
            ["train", "tiny.yaml", "--set", "data.cache_dir=corpus.jsonl/stores"],
            "cannot be written (Not a directory), but it must be; make room, or set data.cache_dir to another folder",
        ),
    ],
    ids=str.split(
        "no-file folder key set source empty-text broken-line all-dropped too-long tree profile planner degree "
        "vocabulary family max-tokens cache-dir"
    ),
)
def test_a_wrong_setting_is_one_sentence_before_any_rank_starts(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    write_run(tmp_path)
    (tmp_path / "typo.yaml").write_text((tmp_path / "tiny.yaml").read_text().replace("steps: 9", "stpes: 9"))
    (tmp_path / "empty.jsonl").write_text(json.dumps({"text": ""}) + "\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "a\n')
    result = run(tmp_path, *arguments)
    assert sentence in refusal(result)
    assert result.out == ""
    assert not (tmp_path / "runs").exists()


def test_a_word_that_is_no_command_is_told_the_nearest(tmp_path: Path) -> None:
    result = run(tmp_path, "trian", "tiny.yaml")
    assert result.code == 2
    assert "No such command 'trian'" in result.err
    assert "'train'" in result.err
    assert "Traceback" not in result.err


# --- Found by the ranks --------------------------------------------------------------------------


def test_a_model_that_only_transformers_can_tell_is_refused_once_for_all_ranks(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = run(tmp_path, "train", "tiny.yaml", *TWO_RANKS, "--set", "model.config.attention_dropout=0.1")
    assert refusal(result) == (
        "ModelError: attention_dropout is 0.1, but nestsp runs none; set model.config.attention_dropout: 0"
    )
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_no_number_ends_all_ranks_and_keeps_what_was_saved(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = run(tmp_path, "train", "tiny.yaml", *TWO_RANKS, "--set", "train.learning_rate=1e30")
    sentence = refusal(result)
    assert " of step 2 is nan, but it must be finite; no weight was changed by this step, so lower" in sentence
    assert [path.name for path in (tmp_path / "runs" / "tiny-1" / "checkpoints").iterdir()] == ["step-000001"]
    assert len((tmp_path / "runs" / "tiny-1" / "metrics.jsonl").read_text().splitlines()) == 1


def test_fewer_ranks_than_asked_for_under_torchrun_is_one_sentence(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = run(
        tmp_path, "--standalone", "--nproc-per-node", "2", "-m", "nestsp", "train", "tiny.yaml", program=TORCHRUN
    )
    assert result.code != 0
    assert result.sentences == [
        "nestsp: LaunchError: cluster.ranks is 4, but torchrun started 2 ranks on this host; start it with "
        "--nproc-per-node 4, or leave cluster.ranks out"
    ]
    assert not (tmp_path / "runs").exists()


def test_a_typo_under_torchrun_is_said_by_one_rank(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = run(
        tmp_path, "--standalone", "--nproc-per-node", "4", "-m", "nestsp", "train", "tiny.yaml",
        "--set", "train.stpes=1", program=TORCHRUN,
    )  # fmt: skip
    assert result.code != 0
    assert result.sentences == [
        "nestsp: ConfigError: --set names train.stpes, but there is no such setting; did you mean 'steps'?"
    ]


def test_a_rank_without_torchruns_variables_is_told_which(tmp_path: Path) -> None:
    write_run(tmp_path)
    env = shutil.which("env")
    assert env is not None
    result = run(
        tmp_path,
        "train",
        "tiny.yaml",
        program=(env, "RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=2", *NESTSP),
    )
    assert refusal(result) == (
        "LaunchError: LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set, but a rank needs RANK, WORLD_SIZE, "
        "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start the ranks by torchrun, or set what it sets"
    )
