from pathlib import Path

EVAL = f"eval {{run}} --data {Path(__file__).parents[2] / 'evaluate' / 'rows'}"

ROWS = [
    ("eval", 2, "run"),
    ("eval {run}/none", 2, "{run}/none"),
    (f"{EVAL} --tasks piqqa", 2, "piqa"),
    (f"{EVAL} --tasks ,", 2, "--tasks"),
    ("eval {run} --data {run}", 2, "arc_challenge"),
    (f"{EVAL} --limit 0", 2, "--limit"),
    (f"{EVAL} --batch-size 0", 2, "--batch-size"),
    (f"{EVAL} --device gpu", 2, "--device gpu"),
    (f"{EVAL} --precision int8", 2, "int8"),
    (f"{EVAL} --step 5", 2, "step 5"),
]
