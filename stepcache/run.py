"""`stepcache run train.py …`: whether this process is that. `run_command.py` has the command."""

from __future__ import annotations

import os
import sys

OPTIONS = "STEPCACHE_RUN"
"""The environment variable that tells a program how it is run."""


def is_asked() -> bool:
    """Whether this process is to run a program, and then is replaced by it.

    Asked before anything is imported: JAX takes long, and reads its settings when it is.
    """
    command, given = sys.argv[0].rpartition(os.sep)[2] if sys.argv else "", sys.orig_argv
    if command == "-m":  # As long as Python looks for the module.
        command = given[given.index("-m") + 1] if "-m" in given else ""
    return command == "stepcache" and sys.argv[1:2] == ["run"] and OPTIONS not in os.environ
