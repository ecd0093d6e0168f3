import os
import sys

# python -m puts the current directory first, where a file of any name may lie. torchrun starts its processes so too
if sys.path[0] == os.getcwd():
    del sys.path[0]

from spheret.cli import main

sys.exit(main())
