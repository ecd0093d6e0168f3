"""Scripts that use timm, in a process of their own: timm and its torchvision live apart."""

import json
import subprocess
import sys
from pathlib import Path

START = """
import json, sys

sys.path.append(sys.prefix + "/timm")
import torch

# torchvision there is built for CUDA and has lost its own ops; timm only needs their names
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor x) -> Tensor")
library.define("qnms(Tensor x) -> Tensor")
torch.set_num_threads(1)
"""


def run(script: str, *folders: Path):
    """What a script prints last, as JSON. folders: where it finds modules."""
    paths = "".join(f"sys.path.insert(0, {str(folder)!r})\n" for folder in folders)
    done = subprocess.run([sys.executable, "-c", START + paths + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
