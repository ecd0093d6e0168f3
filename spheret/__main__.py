import sys

from spheret.cli import main

sys.exit(main())
