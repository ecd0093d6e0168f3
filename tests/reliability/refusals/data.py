PREPARE = "prepare {text} --tokenizer bytes --out {out}"

ROWS = [
    (f"{PREPARE} --val-fraction 1.0", 2, "--val-fraction"),
    (f"{PREPARE} --workers 0", 2, "--workers"),
    (f"{PREPARE} --shard-tokens 0", 2, "--shard-tokens"),
    ("prepare {text}", 2, "--out"),
    ("prepare {text} --out {text}", 2, "{text}"),
    ("prepare {text} --out {run}", 2, "{run}"),
    ("prepare {text} --out {data}", 2, "{data}"),
    ("prepare openwebtex --out {out}", 2, "openwebtext"),
    ("prepare {run}/*.txt --out {out}", 2, "{run}"),
    ("prepare sotu --files {out}/*.parquet --out {out}", 2, "--files"),
    ("prepare {text} --tokenizer gtp2 --out {out}", 2, "gpt2"),
    ("prepare {text} --tokenizer bpe:many --out {out}", 2, "257"),
    ("prepare {text} --tokenizer gpt2:5 --out {out}", 2, "option"),
    ("prepare --verify --out {run}", 2, "{run}"),
    # among the text, where it would be text the next time
    ("train --data {folder} --scheme pre-ln --steps 1 --out {folder}/deep/out", 2, "--out"),
    ("train --data {folder}/**/*.txt --scheme pre-ln --steps 1 --out {folder}/deep/out", 2, "--out"),
    ("train --data {run}/none --scheme pre-ln --steps 1 --out {out}", 2, "--data"),
    ("train --data {data} --tokenizer gpt2 --scheme pre-ln --steps 1 --out {out}", 2, "--tokenizer"),
]
