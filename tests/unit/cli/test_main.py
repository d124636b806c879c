"""The command line without ranks: help, settings, version; and what starting costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nestsp
from nestsp.cli.main import app
from nestsp.config import describe_settings, parse_config

RUNNER = CliRunner()


def shown(*arguments: str) -> str:
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    return result.output


def test_help_names_every_command_and_every_option() -> None:
    overview = shown("--help")
    for command in ("train", "verify", "export", "config"):
        assert f"\n  {command} " in overview
    assert "..." not in overview.partition("Commands:")[2]
    train = shown("train", "--help")
    for words in ("--set KEY=VALUE", "--resume auto|PATH", "torchrun --nproc-per-node 4 -m nestsp train CONFIG\n"):
        assert words in train
    assert "--max-tokens" in shown("verify", "--help")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
)
def test_G26_ranks_let_segments_grow_before_torch_is_there(given: dict[str, str], kept: dict[str, str]) -> None:
    code = (
        "import os, sys, nestsp.cli.main as main\n"
        "main._let_segments_grow()\n"
        "assert 'torch' not in sys.modules\n"
        "print({k: v for k, v in os.environ.items() if 'ALLOC_CONF' in k})\n"
    )
    clean = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean | given, check=True)
    assert done.stdout.strip() == str(kept)


def test_version_is_the_packages() -> None:
    assert shown("--version") == f"nestsp {nestsp.__version__}\n"


def test_config_prints_every_setting_with_its_meaning() -> None:
    text = shown("config")
    flat = " ".join(text.replace("#", " ").split())
    for key, _, _, meaning in describe_settings():
        assert f"{key.rpartition('.')[2]}:" in text
        assert " ".join(meaning.split()) in flat
    assert all(len(line) <= 120 for line in text.splitlines())


def test_what_config_prints_is_a_config_once_the_required_settings_are_filled_in() -> None:
    text = shown("config")
    required = {
        "  config: null  # text | mapping | null": "  config: {model_type: llama}",
    }
    for line, filled in required.items():
        assert line in text
        text = text.replace(line, filled)
    config = parse_config(text, ["train.steps=3", "data.tokens_per_step=7"])
    assert config == parse_config(
        "model: {config: {model_type: llama}}\ndata: {tokens_per_step: 7}\ntrain: {steps: 3}\n"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["config"], ["train", "nowhere.yaml"]])
def test_help_and_refusals_load_no_torch(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from nestsp.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was loaded'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
