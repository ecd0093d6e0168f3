ROWS = [
    ("export {text}/none --out {out}", 2, "{text}/none"),
    ("export {run} --out {run}", 2, "{run}"),
    ("export {run} --out {out} --as gpt3", 2, "gpt2"),
    ("export {run} --out {out} --as gpt2", 2, "pre-ln"),
    ("export {run} --out {out} --step 7", 2, "step 7"),
    ("export {run} --out .", 2, "--out"),
    ("import {run}/none --out {out}", 2, "{run}/none"),
    ("import {text} --out {out}", 2, "{text}"),
    ("import {run}/checkpoints --out {out}", 2, "config.json"),
    ("import {run} --out {text}", 2, "--out {text}"),
]
