"""Compile the Triton kernels for several GPUs, without a GPU, and print ptxas's report of each as JSON.

This is a separate program because the tests run Triton's interpreter, which is chosen when triton is imported.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spheret.kernels import triton_rows
from spheret.kernels.triton import STRIP, shape

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CHIPS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
ROWS = {"h_ptr", "f_ptr", "out_ptr", "g_ptr", "dh_ptr", "df_ptr"}


def report(case):
    (name, gain), width, dtype, arch = case
    kernel = getattr(triton_rows, name)
    strip = STRIP if gain and name == "backward_rows" else 1
    tile = shape(width, strip)
    warps = tile.pop("num_warps")
    # the case with the most code: the general retraction, capped, with step and p in memory
    constants = {"KIND": "angular", "CAPPED": True, "ALPHA": 1, "P": 1, "RADIUS": 1, "GAIN": gain, **tile}
    constants["STRIP"] = strip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}

    def kind(name):
        if name in constants:
            return "constexpr"
        return (
            f"*{dtype}" if name in ROWS else "*fp32" if name.endswith("_ptr") else "i32" if name in "nd" else "fp32"
        )

    signature = {name: kind(name) for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr") or name == "d"]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps},
    )
    tool = BIN / "ptxas-blackwell" if arch >= 100 and (BIN / "ptxas-blackwell").exists() else BIN / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [tool, "-v", f"--gpu-name={CHIPS[arch]}", file.name, "-o", "/dev/null"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {
        "kernel": f"{kernel.__name__}, normed" if gain else kernel.__name__,
        "width": width,
        "dtype": dtype,
        "arch": arch,
        "registers": int(re.search(r"Used (\d+) registers", output)[1]),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", output))),
    }


if __name__ == "__main__":
    kernels = [(name, False) for name in ("forward_rows", "backward_rows", "norm_forward_rows", "norm_backward_rows")]
    kernels += [("forward_rows", True), ("backward_rows", True)]
    widths = [int(width) for width in sys.argv[1:]] or [768, 1280, 4096, 8192, 16384]
    cases = itertools.product(kernels, widths, ("bf16", "fp32"), CHIPS)
    # it runs when few other tests are left: both cores are free
    with ProcessPoolExecutor(2) as pool:
        json.dump(list(pool.map(report, cases)), sys.stdout)
