"""What earlier processes found in the files of installed modules, in one file of a directory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from stepcache.storage import plain, private_files

Rows = dict[str, list[Any]]

_ROW = tuple[int, int, int, int, str, list[str]]
_MOST_ROWS = 8192
_log = logging.getLogger("stepcache")


class ContentIndex:
    """The rows of `fingerprint/module_contents.py`, by path."""

    def __init__(self, path: Path, writable: bool = True):
        self._path, self._writable = path, writable

    def read(self) -> Rows:
        """The rows; none where the file is not there, or is damaged."""
        try:
            rows = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        found = rows.items() if isinstance(rows, dict) else ()
        return {path: row for path, row in found if plain.fits(row, _ROW)}

    def write(self, rows: Rows) -> None:
        """Writes all rows, in the place of those that are there."""
        if not self._writable:
            return
        newest = dict(list(rows.items())[-_MOST_ROWS:])
        try:
            private_files.replace_file(self._path, json.dumps(newest))
        except (OSError, ValueError) as error:
            self._writable = False
            _log.info("stepcache does not store the contents of modules: %s", error)
