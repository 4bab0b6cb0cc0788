"""Says that a build takes long: a progress line on a terminal, one log line elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from stepcache.events import BuildFailed, Built, Event, Loaded, StageStarted, recorder

_log = logging.getLogger("stepcache")


@dataclass(slots=True)
class _Running:
    step: str
    stage: str
    started: float
    timer: threading.Timer
    thread: int
    progress: Progress | None = None


@dataclass(slots=True)
class BuildProgress:
    """A subscriber of the recorder that shows builds which take longer than `after_seconds`.

    Attributes:
        after_seconds: how long a build stays silent.
        console: where to show it; by default, standard error as it is at that time.
    """

    after_seconds: float = 2.0
    console: Console | None = None
    _running: dict[int, _Running] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, event: Event) -> None:
        match event:
            case StageStarted():
                self._enter_stage(event)
            case Built() | Loaded():
                _log.info("%s", event.miss)
                self._finish(event.build_id)
            case BuildFailed():
                self._finish(event.build_id)

    def _enter_stage(self, event: StageStarted) -> None:
        with self._lock:
            running = self._running.get(event.build_id)
            if running is None:
                timer = threading.Timer(self.after_seconds, self._show, [event.build_id])
                timer.daemon = True
                started, thread = time.monotonic(), threading.get_ident()
                running = _Running(event.step, event.stage, started, timer, thread)
                self._running[event.build_id] = running
                timer.start()
            running.stage = event.stage
            if running.progress is not None:
                running.progress.update(running.progress.task_ids[0], stage=event.stage)

    def _show(self, build_id: int) -> None:
        with self._lock:
            running = self._running.get(build_id)
            if running is None or _is_in_debugger(running.thread):
                return
            console = self.console or Console(stderr=True)
            if not console.is_terminal:
                elapsed = time.monotonic() - running.started
                _log.warning(
                    "building %s takes long: in %s after %.1f s",
                    running.step,
                    running.stage,
                    elapsed,
                )
                return
            progress = Progress(
                SpinnerColumn(),
                TextColumn("building {task.fields[step]}: {task.fields[stage]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
                # Else rich puts its own in the place of sys.stdout and sys.stderr, and what a step
                # prints to one goes to the other.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            progress.add_task("", step=running.step, stage=running.stage)
            progress.start()
            running.progress = progress

    def _finish(self, build_id: int) -> None:
        with self._lock:
            running = self._running.pop(build_id, None)
        if running is None:
            return
        running.timer.cancel()
        if running.progress is not None:
            running.progress.stop()


def _is_in_debugger(thread: int) -> bool:
    """Whether a thread is stopped in pdb, or another debugger made of `bdb`, which prompts."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") == "bdb":
            return True
        frame = frame.f_back
    return False


recorder.subscribe(BuildProgress())
