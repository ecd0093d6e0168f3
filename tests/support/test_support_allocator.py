"""The heap of a training process: freed memory is kept, and lies in huge pages."""

import json
import subprocess
import sys

# prints the flags of the mapping that a fresh block of 64 MB lies in, and how much the resident memory has grown
PROGRAM = """
import ctypes, json, sys
from spheret.support.allocator import keep_freed_memory

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

if len(sys.argv) > 1:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, resource.RLIM_INFINITY))
linux = sys.platform.startswith("linux")
before = resident() if linux else 0
kept = keep_freed_memory() and keep_freed_memory()
after = resident() if linux else 0
flags = []
if kept and linux:
    malloc = ctypes.CDLL(None).malloc
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    # past its first pages, which may lie before the first huge page
    middle, inside = malloc(64 << 20) + (32 << 20), False
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(number, 16) for number in words[0].split("-"))
            inside = start <= middle < end
        elif inside and words[0] == "VmFlags:":
            flags = words[1:]
print(json.dumps({"kept": kept, "linux": linux, "flags": flags, "grew": after - before}))
"""


def _run(*arguments):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_heap_lies_in_huge_pages_and_takes_no_memory_before_it_is_used():
    seen = _run()
    assert ("hg" in seen["flags"]) == (seen["kept"] and seen["linux"])
    assert seen["grew"] < 20_000


def test_nothing_is_reserved_where_the_address_space_is_limited():
    assert "hg" not in _run("limited")["flags"]
