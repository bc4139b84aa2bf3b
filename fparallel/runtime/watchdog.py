"""Deadlines: no wait hangs, whatever a peer does.

The transport's own timeouts come first. Behind them stands a daemon thread, one per process: if the process
is still inside one wait some seconds after the deadline (stuck in a C call), it prints where the rank stands
and ends the process. It also makes Ctrl-C work during a wait: the main thread cannot run Python's handler
inside a C call, so the thread ends the process.
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
_TICK = 0.5  # seconds


class Watch:
    """Watches one rank's waits: `with watch: work.wait()`.

    Args:
      deadline: seconds that a wait may take.
      report: says where the rank stands, for the message on the way out.

    The transport's own timeout gets a fifth of the deadline more (at least one second, at most ten) to raise.
    """

    def __init__(self, deadline: float, report: Callable[[], str]) -> None:
        self.deadline, self.report = deadline, report
        self.grace = min(10.0, max(1.0, 0.2 * deadline))
        self.since: float | None = None
        _start()

    def __enter__(self) -> None:
        self.since = time.monotonic()
        _current[0] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.since = _current[0] = None


_current: list[Watch | None] = [None]
_process: list[int] = []  # the process that has a thread: a fork has none


def _start() -> None:
    if _process == [os.getpid()]:
        return
    _process[:] = [os.getpid()]
    interrupts, wake = os.pipe()
    os.set_blocking(wake, False)
    if threading.current_thread() is threading.main_thread():
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        if before != -1:  # an event loop uses it: leave it alone
            signal.set_wakeup_fd(before)
    threading.Thread(target=_run, args=(interrupts,), name="fparallel-watchdog", daemon=True).start()


def _run(interrupts: int) -> None:
    interrupted: float | None = None  # the start of the wait that Ctrl-C came into
    came = 0.0  # and when it came
    while True:
        readable, _, _ = select.select([interrupts], [], [], _TICK)
        watch = _current[0]
        since = None if watch is None else watch.since
        now = time.monotonic()
        if readable and signal.SIGINT in os.read(interrupts, 64):
            interrupted, came = since, now
        if watch is None or since is None:
            continue
        if since == interrupted and now - came >= _TICK * 0.9:
            # a wait that ended by itself would have let Python raise KeyboardInterrupt
            _leave(watch, f"interrupted after waiting {now - since:.0f} s", EXIT_INTERRUPTED)
        if now - since > watch.deadline + watch.grace:
            _leave(watch, f"no answer within the deadline of {watch.deadline:g} s", EXIT_STUCK)


def _leave(watch: Watch, why: str, code: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.write(f"fparallel: {why}\n{watch.report()}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)
