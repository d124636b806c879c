"""Tokenizers: bytes, and Hugging Face tokenizers made here, so that no network is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from nestsp.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from nestsp.errors import DataError

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5}


def _save(folder: Path, settings: dict[str, Any] | None = None, *, bos_by_file: bool = False, **saved: Any) -> Path:
    """Write a tokenizer of three words."""
    backend = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos_by_file:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if "max_length" in saved:
        backend.enable_truncation(saved["max_length"])
        backend.enable_padding(length=saved["max_length"])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _ids(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    return [tokens.tolist() for tokens in tokenizer.encode_batch(texts)]


def test_a_byte_is_a_token_and_nothing_is_added() -> None:
    tokenizer = open_tokenizer("bytes", append_eos=True)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (256, None)
    assert _ids(tokenizer, "é\n", "", "a") == [[0xC3, 0xA9, 0x0A], [], [0x61]]
    assert all(tokens.dtype == np.uint8 for tokens in tokenizer.encode_batch(["a", ""]))
    assert tokenizer == ByteTokenizer()


def test_the_end_of_text_token_is_appended_once_and_only_when_asked(tmp_path: Path) -> None:
    folder = str(_save(tmp_path, {"eos_token": "</s>"}))
    assert _ids(open_tokenizer(folder, append_eos=True), "a b", "", "a </s>") == [[3, 4, 2], [], [3, 2]]
    assert _ids(open_tokenizer(folder, append_eos=False), "a b", "", "a </s>") == [[3, 4], [], [3, 2]]


def test_a_tokenizer_without_an_end_of_text_token_appends_nothing(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(_save(tmp_path)))
    assert tokenizer.eos_id is None
    assert _ids(tokenizer, "a b") == [[3, 4]]


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}])
def test_the_end_of_text_token_is_found_in_either_file_and_form(tmp_path: Path, eos: object) -> None:
    assert open_tokenizer(str(_save(tmp_path / "config", {"eos_token": eos}))).eos_id == 2
    folder = _save(tmp_path / "map")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": eos}))
    assert open_tokenizer(str(folder)).eos_id == 2


def test_special_tokens_are_those_of_the_post_processor(tmp_path: Path) -> None:
    folder = str(_save(tmp_path, {"eos_token": "</s>"}, bos_by_file=True))
    assert _ids(open_tokenizer(folder, append_eos=False), "a", "") == [[1, 3], []]


@pytest.mark.parametrize("bos_by_file", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": False},
    ],
)
def test_tokens_are_those_of_transformers(tmp_path: Path, flags: dict[str, bool], bos_by_file: bool) -> None:
    transformers = pytest.importorskip("transformers")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **flags}
    folder = str(_save(tmp_path, settings, bos_by_file=bos_by_file))
    texts = ["a b c", "c", "a nothing"]
    expected = transformers.AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    assert _ids(open_tokenizer(folder, append_eos=False), *texts) == expected


def test_truncation_and_padding_saved_in_the_file_are_switched_off(tmp_path: Path) -> None:
    folder = str(_save(tmp_path, max_length=3))
    assert _ids(open_tokenizer(folder), "a", "a b c a b") == [[3], [3, 4, 5, 3, 4]]


def test_identity_changes_with_all_that_shapes_tokens_and_with_nothing_else(tmp_path: Path) -> None:
    one = str(_save(tmp_path / "one", {"eos_token": "</s>", "model_max_length": 1}))
    same = str(_save(tmp_path / "same", {"eos_token": "</s>", "model_max_length": 2}))
    identities = {
        "eos": open_tokenizer(one).identity,
        "no eos": open_tokenizer(one, append_eos=False).identity,
        "other eos": open_tokenizer(str(_save(tmp_path / "other", {"eos_token": "<s>"}))).identity,
        "bos": open_tokenizer(str(_save(tmp_path / "bos", {"eos_token": "</s>"}, bos_by_file=True))).identity,
        "bytes": open_tokenizer("bytes").identity,
    }
    assert open_tokenizer(same).identity == identities["eos"]
    assert open_tokenizer("bytes", append_eos=False).identity == identities["bytes"]
    assert len(set(identities.values())) == len(identities)


def test_a_tokenizer_that_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no tokenizer\.json; load it with"):
        open_tokenizer(str(tmp_path / "empty"))
    broken = _save(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json that cannot be read"):
        open_tokenizer(str(broken))
    with pytest.raises(DataError, match=r"but it must be a folder; give .*broken"):
        open_tokenizer(str(broken / "tokenizer.json"))
    with pytest.raises(DataError, match=r"'</t>' as its eos_token, but its tokenizer\.json has no such token"):
        open_tokenizer(str(_save(tmp_path / "unknown", {"eos_token": "</t>"})))
    settings = _save(tmp_path / "settings")
    (settings / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is list, but it must be an object"):
        open_tokenizer(str(settings))
    for name in ("", "./nothing", str(tmp_path / "nothing"), "a/b/c"):
        with pytest.raises(DataError, match="there is no such folder; give 'bytes'"):
            open_tokenizer(name)


def test_a_name_is_looked_up_in_the_local_cache_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(name: str, *, local_files_only: bool, **_: object) -> str:
        asked.append((name, local_files_only))
        return str(_save(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert _ids(open_tokenizer("some/name"), "a") == [[3]]
    assert asked == [("some/name", True)]


@pytest.mark.parametrize(("name", "remedy"), [("some/name", "download it first"), ("byte", "did you mean 'bytes'?")])
def test_a_name_that_nobody_gives_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    def snapshot(*_: object, **__: object) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(DataError, match=r"local cache do not give it \(ConnectionError\); ") as caught:
        open_tokenizer(name)
    assert remedy in str(caught.value)


def test_a_hugging_face_tokenizer_needs_no_torch(tmp_path: Path) -> None:
    folder = _save(tmp_path, {"eos_token": "</s>"})
    code = (
        "import sys\nfrom nestsp.data.tokenizer import open_tokenizer\n"
        f"print(open_tokenizer({str(folder)!r}).encode_batch(['a'])[0].tolist(), 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[3, 2] False"
