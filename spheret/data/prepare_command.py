"""`spheret prepare`."""

from __future__ import annotations

import sys
from pathlib import Path

from spheret.data import shards
from spheret.data.corpora import resolve
from spheret.data.preparation import SHARD_TOKENS, check_numbers, place, prepare


def prepare_command(
    corpus: str = "sotu",
    /,
    tokenizer: str | None = None,
    out: str | None = None,
    val_fraction: float | None = None,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    files: str | None = None,
    column: str = "text",
    verify: bool = False,
) -> int:
    """Turn a corpus into checked shards of token ids. Run the same command again to continue.

    Args:
        corpus: sotu, stdlib, rfc, python, openwebtext, fineweb-edu, or a file, folder or glob of text, .jsonl and
            .parquet.
        tokenizer: bytes, gpt2, bpe:N (trained on the corpus), or a path to a tokenizer.json. The default is
            gpt2 for openwebtext and fineweb-edu, otherwise bytes.
        out: the directory to write. The default for a named corpus is the cache.
        val_fraction: the share of documents in the validation split, or of each document if they are too few. The
            default is 0.005, and 0.05 below 256 MiB of text.
        workers: the number of tokenizing threads. The default is one per core. The output does not depend on it.
        shard_tokens: the number of ids per shard.
        files: a glob of parquet files, the local copy of openwebtext or fineweb-edu.
        column: the column of .jsonl and .parquet that holds the text.
        verify: write nothing; compare every byte of --out with its manifest.
    """
    try:
        check_numbers(val_fraction, workers, shard_tokens)
        if verify:
            directory = Path(out or place(resolve(corpus, files, column), tokenizer, None, val_fraction)[2])
            manifest = shards.verify(directory.expanduser())
            print(f"every shard matches its SHA-256: {manifest.summary()}")
            return 0
        data = prepare(
            corpus,
            tokenizer,
            out,
            val_fraction=val_fraction,
            workers=workers,
            shard_tokens=shard_tokens,
            files=files,
            column=column,
            quiet=False,
        )
    except KeyboardInterrupt:
        print("stopped. Finished work is kept: run the same command again to go on.", file=sys.stderr)
        return 130
    print(f"{data.path}: {data.manifest.summary()}")
    return 0
