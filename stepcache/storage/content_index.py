"""What earlier processes found in the files of installed modules, in one file of a directory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from stepcache.storage import plain, private_files

Rows = dict[str, list[Any]]

_MOST_ROWS = 8192
_log = logging.getLogger("stepcache")


class ContentIndex:
    """The rows of `fingerprint/module_contents.py`, by path.

    Args:
        path: of the file.
        writable: whether `write` does anything.
    """

    def __init__(self, path: Path, writable: bool = True):
        self._path, self._writable = path, writable

    def read(self) -> Rows:
        """The rows; none where the file is not there, or is damaged."""
        try:
            rows = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        if not plain.fits(rows, dict[str, list[Any]]):
            return {}
        return {path: row for path, row in rows.items() if _is_row(row)}

    def write(self, rows: Rows) -> None:
        """Writes all rows, in the place of those that are there."""
        if not self._writable:
            return
        newest = dict(list(rows.items())[-_MOST_ROWS:])
        try:
            private_files.replace_file(self._path, json.dumps(newest))
        except (OSError, ValueError) as error:
            self._writable = False
            _log.info("stepcache does not keep what modules hold: %s", error)


def _is_row(row: list[Any]) -> bool:
    return (
        len(row) == 6
        and all(type(each) is int for each in row[:4])
        and isinstance(row[4], str)
        and plain.fits(row[5], list[str])
    )
