# words that no command understands, and places that are not what they should be
PREPARE = "prepare sotu --out {out} "
ROWS = [
    ("trian", 2, "train"),
    ("sample", 2, "run"),
    ("sample {run} --count two", 2, "--count"),
    ("sample {run} --count", 2, "--count"),
    ("sample {run} --count " + "9" * 5000, 2, "--count"),
    ("sample {run} --temperature half", 2, "--temperature"),
    ("sample {run} --cuont 2", 2, "--count"),
    ("sample nowhere", 2, "run directory"),
    ("sample \udcff", 2, "UTF-8"),
    ("sample ~no-user-of-this-name/run", 2, "path"),
    ("inspect nowhere --out {text}", 2, "--out"),
    ("race --out {text}", 2, "--out"),
    ("report nowhere --out {text}", 2, "--out"),
    ("reproduce --all --out {text}", 2, "--out"),
    (PREPARE + "--verify --workers=-1", 2, "--workers"),
    (PREPARE + "--workers 100000", 2, "--workers"),
    (PREPARE + "--val-fraction nan", 2, "--val-fraction"),
    (PREPARE + "--shard-tokens " + "9" * 23, 2, "--shard-tokens"),
    (PREPARE + "--tokenizer bpe:" + "9" * 20, 2, "10,000,000"),
]
