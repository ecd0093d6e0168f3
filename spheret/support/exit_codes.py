"""What a command ends with; `spheret train` says what each means."""

from __future__ import annotations

import signal
import sys

FINISHED = 0
# an exception that nobody expected
INTERNAL_ERROR = 1
USAGE_ERROR = 2
STOPPED_BY_GUARD = 3
# 128 + the signal's number, as shells have it
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}
if sys.platform == "win32":
    # Ctrl-Break: there a SIGTERM ends a process without asking it
    SIGNALS[signal.SIGBREAK] = 149
INTERRUPTED = SIGNALS[signal.SIGINT]
# SIGPIPE, which Windows lacks
BROKEN_PIPE = 128 + 13
