"""Folders that are whole or not there: filled beside their place, synced, and renamed once."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

__all__ = ["OLD", "REPLACED", "SAVING", "crc32_of", "prepare_folder", "publish_folder", "write_synced"]

# How folders are called that are not, not yet or no longer what their name without it says.
SAVING = ".saving-"
REPLACED = ".replaced-"
OLD = ".old-"


def prepare_folder(target: Path) -> Path:
    """An empty folder beside a target, to be filled and then published; what an earlier try left there goes.

    Called by one rank. If an earlier replacement was cut short between its two renames, what it replaced is put back.
    """
    saving, replaced = target.with_name(SAVING + target.name), target.with_name(REPLACED + target.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    if replaced.exists():
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)
    if saving.exists():
        shutil.rmtree(saving)
    saving.mkdir()
    return saving


def publish_folder(saving: Path, target: Path) -> None:
    """Rename a filled folder to its target; only then does a target that was there before go. Called by one rank."""
    sync_folder(saving)
    replaced = target.with_name(REPLACED + target.name)
    if target.exists():
        target.rename(replaced)
    try:
        saving.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    sync_folder(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file to the disk itself."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def crc32_of(path: Path) -> int:
    """CRC-32 of a file's content."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc
