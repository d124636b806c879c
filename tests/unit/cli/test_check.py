"""``nestsp check``: a model's support table, or the sentence of refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestsp.cli.check import check_model
from nestsp.cli.main import app
from nestsp.errors import ConfigError, ModelError


def test_a_model_with_windows_shows_where_it_runs() -> None:
    shown = CliRunner().invoke(app, ["check", "gemma-2-9b"])
    assert shown.exit_code == 0
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert lines[0].startswith(
        "model gemma2: 42 layers, hidden 3584, 16 query / 8 key-value heads of 256; 9,241,705,984"
    )
    assert lines[1].startswith("probe 2 layers of it made small: logits, loss and every gradient equal each sequence")
    table = lines[lines.index("local ulysses ring hybrid") :]
    assert "causal attention, packed right right - -" in table
    assert "sliding window of 4096 in 21 layers right right refused refused" in table
    assert "soft cap of 50 on scores right right - -" in table
    assert table[-1] == (
        "hybrid is refused: the model has layers with a sliding window of 4096, which no ring runs; plan with ring "
        "degree 1"
    )


def test_a_config_is_read_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a family that nestsp does not list."""
    keys = {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    check_model(str(tmp_path))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("model gpt_neox: 3 layers, hidden 64, 4 query / 4 key-value heads of 16;")
    assert lines[-1] == "causal attention, packed right right right right"


def test_a_folder_without_a_config_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys; from nestsp.cli.main import app\n"
        "try: app(['check', sys.argv[1]], standalone_mode=False)\n"
        "except Exception as error: print(type(error).__name__, error, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout == (
        f"ConfigError the model is the folder {tmp_path}, but it has no config.json; give a Hugging Face model's "
        "False\n"
    )


@pytest.mark.parametrize(
    ("model", "error", "sentence"),
    [
        ("gemma-2-9", ConfigError, r"the model is 'gemma-2-9', but .*; did you mean 'gemma-2-9b'\?|gemma-2-2b"),
        ("gpt-7b", ModelError, "resid_pdrop is 0.1, but nestsp runs none; set model.config.resid_pdrop: 0"),
    ],
)
def test_what_is_no_model_or_refused_is_one_sentence(model: str, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence) as caught:
        check_model(model)
    assert "\n" not in str(caught.value)
