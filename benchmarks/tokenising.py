"""Reading and tokenising 100 MB of text into a store, against the tokenizers library alone on as many cores.

    python -m benchmarks.tokenising [--megabytes 100] [--pairs 3] [--rows 1000000]

The tokenizer is a byte-level BPE of 16,000 tokens, trained here on a part of the text: the standard library's source,
repeated with a number in each document until there is enough. Ours reads JSON lines from the disk cache, digests them,
and writes the store; the rival has all texts in memory and makes nothing of its results. Both get the same number of
workers: processes for ours, threads for the library. Interleaved pairs; target: at least 0.8 × the library's speed. The
cores' seconds of each are printed too: they show waste also where other work on the machine makes the times useless.
About 3 minutes on 2 idle cores.

Then, what resuming costs: the time from the settings to the batch in the middle of the third epoch of a corpus of a
million samples whose store is there. Target: under a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from benchmarks.common import interleave, ratio, where
from nestsp.config import DataConfig
from nestsp.data.corpus import open_corpus
from nestsp.data.samples import open_samples
from nestsp.data.stream import DataState, SampleStream

TARGET_RATIO = 0.8
TARGET_S = 1.0
NUM_WORKERS = len(os.sched_getaffinity(0))

# A process of its own, because the library reads its number of threads once.
_RIVAL = """
import json, sys, time, tokenizers
backend = tokenizers.Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2], encoding="utf-8") as file:
    texts = [json.loads(line)["text"] for line in file]
start, cpu = time.perf_counter(), time.process_time()
for first in range(0, len(texts), 1024):
    backend.encode_batch_fast(texts[first : first + 1024])
print(time.perf_counter() - start, time.process_time() - cpu)
"""


def texts(num_bytes: int) -> Iterator[str]:
    """Functions and classes of the standard library, again and again, no two alike."""
    documents = [text for text in open_corpus("stdlib").read() if isinstance(text, str)]
    written = number = 0
    while written < num_bytes:
        text = f"# {number}\n{documents[number % len(documents)]}"
        written += len(text.encode())
        number += 1
        yield text


def write_corpus(path: Path, num_bytes: int) -> None:
    """JSON lines of so much text."""
    with path.open("w", encoding="utf-8") as file:
        for text in texts(num_bytes):
            file.write(json.dumps({"text": text}) + "\n")


def train_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 16,000 tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts(4_000_000), trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))


def compare(folder: Path, num_bytes: int, num_pairs: int) -> None:
    """Time both and print the ratio of their speeds."""
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    write_corpus(corpus, num_bytes)
    train_tokenizer(tokenizer)
    built = 0
    ours_cpu_s: list[float] = []
    library_cpu_s: list[float] = []

    def ours() -> float:
        nonlocal built
        built += 1
        config = DataConfig(
            source=str(corpus),
            tokenizer=str(tokenizer),
            cache_dir=str(folder / f"stores-{built}"),
            workers=NUM_WORKERS,
            sequences_per_step=1,
        )
        start, cpu = time.perf_counter(), sum(os.times()[:4])
        open_samples(config)
        ours_cpu_s.append(sum(os.times()[:4]) - cpu)
        return time.perf_counter() - start

    def library() -> float:
        command = [sys.executable, "-c", _RIVAL, str(tokenizer / "tokenizer.json"), str(corpus)]
        environment = {**os.environ, "RAYON_NUM_THREADS": str(NUM_WORKERS), "TOKENIZERS_PARALLELISM": "true"}
        said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        seconds, cpu = map(float, said.split())
        library_cpu_s.append(cpu)
        return seconds

    ours_s, library_s = interleave(ours, library, num_pairs)
    speeds = ratio(library_s, ours_s)
    print(f"ours {np.median(ours_s):.1f} s, the library alone {np.median(library_s):.1f} s, {NUM_WORKERS} workers each")
    print(f"speed of ours over the library's: {speeds}; target {TARGET_RATIO}")
    cpu = ratio(library_cpu_s[1:], ours_cpu_s[1:])  # each warms up once
    print(f"seconds of the cores: ours {np.median(ours_cpu_s):.1f}, the library {np.median(library_cpu_s):.1f}; {cpu}")


def resume(folder: Path, num_rows: int) -> None:
    """Time from settings to a batch in the middle of the third epoch."""
    path = folder / "many.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"input_ids": [{number % 250}, 1, 2]}}\n' for number in range(num_rows))
    config = DataConfig(source=str(path), cache_dir=str(folder / "many"), tokens_per_step=3000, workers=NUM_WORKERS)
    open_samples(config)
    start = time.perf_counter()
    samples = open_samples(config)
    opened = time.perf_counter()
    stream = SampleStream(samples.lengths, tokens_per_step=config.tokens_per_step, shares=samples.shares)
    stream.take(DataState(2, num_rows // 2))
    end = time.perf_counter()
    print(
        f"{num_rows:,} samples: {opened - start:.2f} s to open the store, {end - opened:.2f} s to the batch in the "
        f"middle of the third epoch; target {TARGET_S} s together"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    print(where())
    with tempfile.TemporaryDirectory() as folder:
        resume(Path(folder), options.rows)
        compare(Path(folder), options.megabytes * 1_000_000, options.pairs)


if __name__ == "__main__":
    main()
