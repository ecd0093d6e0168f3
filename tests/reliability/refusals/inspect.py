ROWS = [
    ("inspect nowhere", 2, "nowhere"),
    ("inspect {run} --windows 0", 2, "windows"),
    ("inspect {run} --windows 100000", 2, "--windows"),
    ("inspect {run} --step 3", 2, "step 3"),
    ("inspect {run} --step -1", 2, "step"),
    ("inspect {run} --data nowhere", 2, "nowhere"),
    ("inspect {run} --device tpu", 2, "tpu"),
]
