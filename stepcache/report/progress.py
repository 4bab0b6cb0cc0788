"""Shows long builds: a progress line on a terminal, one log line elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepcache.events import BuildFailed, Built, Event, Loaded, StageStarted, recorder

if TYPE_CHECKING:  # Rich takes long to import, and few builds are shown.
    from rich.console import Console
    from rich.progress import Progress

_log = logging.getLogger("stepcache")


_LOOK_SECONDS = 0.1


@dataclass(eq=False, repr=False, slots=True)
class _Running:
    step: str
    stage: str
    started: float
    thread: int
    shown: bool = False
    progress: Progress | None = None


@dataclass(eq=False, repr=False, slots=True)
class BuildProgress:
    """A subscriber of the recorder that shows long builds."""

    after_seconds: float = 2.0  # A build is shown after this time, on a terminal.
    console: Console | None = None  # To show it on; by default standard error.
    log_after_seconds: float = 10.0  # It is logged after this time where that is no terminal.
    _running: dict[int, _Running] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _watcher: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case StageStarted():
                self._enter_stage(event)
            case Built() | Loaded():
                is_news = isinstance(event, Built)
                _log.log(logging.INFO if is_news else logging.DEBUG, "%s", event.miss)
                self._finish(event.build_id)
            case BuildFailed():
                self._finish(event.build_id)

    def _enter_stage(self, event: StageStarted) -> None:
        with self._lock:
            running = self._running.get(event.build_id)
            if running is None:
                started, thread = time.monotonic(), threading.get_ident()
                running = _Running(event.step, event.stage, started, thread)
                self._running[event.build_id] = running
                self._watch()
            running.stage = event.stage
            if running.progress is not None:
                running.progress.update(running.progress.task_ids[0], stage=event.stage)

    def _watch(self) -> None:
        if self._watcher is not None and self._watcher.is_alive():
            return
        watcher = threading.Thread(target=self._look, name="stepcache progress", daemon=True)
        with contextlib.suppress(RuntimeError):  # No thread can be started.
            watcher.start()
            self._watcher = watcher

    def _look(self) -> None:
        """Shows long builds; returns after some time without a build."""
        idle_until = time.monotonic() + self.after_seconds
        while True:
            time.sleep(min(self.after_seconds, _LOOK_SECONDS))
            now = time.monotonic()
            with self._lock:
                if self._running:
                    idle_until = now + self.after_seconds
                elif now > idle_until:
                    self._watcher = None
                    return
                for running in self._running.values():
                    slow = now - running.started >= self.after_seconds
                    if slow and not running.shown and not _is_in_debugger(running.thread):
                        running.shown = self._show(running, now - running.started)

    def _show(self, running: _Running, elapsed: float) -> bool:
        """Shows a build, unless it has not taken long enough for that."""
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = self.console or Console(stderr=True)
        if not console.is_terminal:
            if is_long := elapsed >= self.log_after_seconds:
                message = "building %s takes long: still in %s after %.1f s"
                _log.warning(message, running.step, running.stage, elapsed)
            return is_long
        running.progress = Progress(
            SpinnerColumn(),
            TextColumn("building {task.fields[step]}: {task.fields[stage]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # Redirection would send what a step prints to stdout to stderr, or the other way round.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        running.progress.add_task("", step=running.step, stage=running.stage)
        running.progress.start()
        return True

    def _finish(self, build_id: int) -> None:
        with self._lock:
            running = self._running.pop(build_id, None)
        if running is not None and running.progress is not None:
            running.progress.stop()


def _is_in_debugger(thread: int) -> bool:
    """Returns whether a thread waits at the prompt of pdb, or of another debugger based on bdb."""
    frame = sys._current_frames().get(thread)
    frames = traceback.walk_stack(frame) if frame is not None else ()
    return any(each.f_globals.get("__name__") == "bdb" for each, _ in frames)


SHOWN = BuildProgress()
"""The builds of this process."""
recorder.subscribe(SHOWN, StageStarted | Built | Loaded | BuildFailed)
