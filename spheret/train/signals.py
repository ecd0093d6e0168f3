"""What a training does when it is asked to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spheret.support.errors import SIGNALS


@contextmanager
def stop_signals(received: Callable[[int], None]) -> Iterator[None]:
    """Within the block, the first of SIGNALS calls `received`. A second SIGINT acts as usual.

    The others are ignored from then on until the process ends, which it is about to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handle(number: int, frame: object) -> None:
        received(number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        # a scheduler sends SIGTERM to every process of a job, and the job's shell or torchrun sends it on: the second
        # one must not interrupt the saving
        for each in SIGNALS.keys() - {signal.SIGINT}:
            signal.signal(each, signal.SIG_IGN)

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)
