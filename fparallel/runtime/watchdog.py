"""Deadlines: no wait hangs, whatever a peer does.

The transport's own timeouts come first. Behind them stands a daemon thread: if the process is still inside
one wait some seconds after the deadline (stuck in a C call), it prints where the rank stands and ends the
process. It also makes Ctrl-C work during a wait: the main thread cannot run Python's handler inside a C call,
so the thread ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

EXIT_STUCK = 70
EXIT_INTERRUPTED = 128 + signal.SIGINT


class Watchdog:
    """Watches one rank's waits: `with watchdog: work.wait()`.

    Args:
      deadline: seconds that a wait may take.
      report: says where the rank stands, for the message on the way out.
      grace: seconds that the transport's own timeout gets to raise first.
    """

    def __init__(self, deadline: float, report: Callable[[], str], *, grace: float | None = None) -> None:
        self.deadline, self.report = deadline, report
        self.grace = min(10.0, max(1.0, 0.2 * deadline)) if grace is None else grace
        self.since: float | None = None
        self._stop, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._old_wake = -1
        if threading.current_thread() is threading.main_thread():
            self._old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            if self._old_wake != -1:  # an event loop uses it: leave it alone
                signal.set_wakeup_fd(self._old_wake)
        self._thread = threading.Thread(target=self._watch, name="fparallel-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.since = None

    def _watch(self) -> None:
        period = min(1.0, self.deadline / 4)
        while True:
            readable, _, _ = select.select([self._stop], [], [], period)
            interrupted = bool(readable) and signal.SIGINT in os.read(self._stop, 64)
            if interrupted:
                time.sleep(min(0.5, period))  # a wait that ends by itself lets Python raise KeyboardInterrupt
            since = self.since
            if since is None:
                continue
            waited = time.monotonic() - since
            if interrupted and waited >= min(0.5, period) * 0.9:
                self._leave(f"interrupted after waiting {waited:.0f} s", EXIT_INTERRUPTED)
            if waited > self.deadline + self.grace:
                self._leave(f"no answer within the deadline of {self.deadline:g} s", EXIT_STUCK)

    def _leave(self, why: str, code: int) -> None:
        try:
            sys.stdout.flush()
            sys.stderr.write(f"fparallel: {why}\n{self.report()}\n")
            sys.stderr.flush()
        finally:
            os._exit(code)
