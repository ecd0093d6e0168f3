import json
import os
import subprocess
import sys

from scripts import PROJECT, script


def test_command(tmp_path):
    """As a user starts it: a process of its own, from any directory."""
    out = tmp_path / "data.json"
    words = ["--repeats", "1", "--batches", "20", "--copies", "1", "--gigabytes", "0.01", "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, str(PROJECT / "benchmarks" / "data.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 7
    result = json.loads(out.read_text())
    assert result.keys() >= {"command", "processor", "prepare", "words", "workers", "loader", "memory", "start"}
    assert result["command"] == " ".join(["python benchmarks/data.py", *words])
    assert len(script("benchmarks/data.py").comparisons(result)) == 4
