"""Run folders are numbered, and none is taken twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nestsp.errors import ConfigError
from nestsp.train.run_folder import latest_run_folder, new_run_folder, run_folder_of_job


def test_the_next_number_is_one_above_the_highest(tmp_path: Path) -> None:
    runs = tmp_path / "a" / "runs"
    assert new_run_folder(runs, "x").name == "x-1"
    (runs / "x-9").mkdir()
    assert new_run_folder(runs, "x").name == "x-10"
    assert latest_run_folder(runs, "x") == runs / "x-10"


def test_other_names_do_not_count(tmp_path: Path) -> None:
    for name in ("x-y-7", "xx-8", "x-07", "x-0", "x-", "x-3.old", "axb-5"):
        (tmp_path / name).mkdir()
    assert new_run_folder(tmp_path, "x").name == "x-1"
    assert new_run_folder(tmp_path, "a.b").name == "a.b-1"


def test_a_file_takes_a_number_too(tmp_path: Path) -> None:
    (tmp_path / "x-1").write_text("")
    assert new_run_folder(tmp_path, "x").name == "x-2"


def test_runs_that_start_at_once_get_a_folder_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda _: new_run_folder(tmp_path, "x"), range(64)))
    assert len(set(folders)) == 64


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"no folder can be made there \(.*\); set it to a folder that can be written$"
    ):
        new_run_folder(tmp_path / "file" / "runs", "x")


@pytest.mark.parametrize("exists", [True, False])
def test_there_is_no_latest_run_where_there_is_none(tmp_path: Path, exists: bool) -> None:
    runs = tmp_path / "runs"
    if exists:
        (runs / "y-1").mkdir(parents=True)
    assert latest_run_folder(runs, "x") is None


def test_a_restarted_job_finds_the_latest_run_that_it_wrote_itself(tmp_path: Path) -> None:
    for number, job in ((1, "ours"), (2, "ours"), (3, "another's"), (4, None)):
        folder = tmp_path / f"x-{number}"
        folder.mkdir()
        if job is not None:
            (folder / ".job").write_text(job)
    assert run_folder_of_job(tmp_path, "x", "ours") == tmp_path / "x-2"
    assert run_folder_of_job(tmp_path, "x", "a third one") is None
    assert run_folder_of_job(tmp_path / "nowhere", "x", "ours") is None
