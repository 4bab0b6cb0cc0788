"""`TableFiles`: the bases of tables, as `.npy` files that are mapped into the host's memory.

The maps are private: what the host writes stays in its own memory. The kernel can reclaim pages
that were not written to, so that a table may be larger than the memory. Rows that were never
written to take no space on disk.

Snapshots and images hold the rows that are not in the files. Before the next snapshot is written,
the rows of the last one are merged into the files, so that the next one need not hold them. Both
snapshots that are kept are consistent with the files, except while the next one is being written.
Merging is idempotent: after a crash in the middle of it, the same snapshot repairs the files.

All tables that together take at most a quarter of the available memory are kept in it: in the
background their files are read and copied into memory of the host, which stays. Of any other table
a page is read when one of its rows is first looked up and copied when one is updated, while all
clients wait, and freed after two snapshots.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepcache.errors import VariablesError
from stepcache.serving.tables import MAX_TABLE_BYTES, HeldTable, SavedTable, TableType
from stepcache.storage.private_files import listed, remove, replace_file, sync, write_at

_HEADER_BYTES = 4096  # So that rows begin on a page.
_WITHOUT_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0)
_MOMENT = "moment"
_AHEAD_BYTES = 128 << 10  # Copied in a fraction of a millisecond, while no Python runs.
_POPULATE_WRITE = 23  # `MADV_POPULATE_WRITE` of Linux 5.14; an error before.
_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_LIMITS = {  # Where the control groups are, and their files: the limit, and what is taken of it.
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
_OF_FILES = ("inactive_file", "active_file")  # Not of shared memory, which stays.


class _Mapped(NamedTuple):
    map: mmap.mmap
    row_bytes: int


class TableFiles:
    """The tables of one directory, which has a directory for each, with a file for each array."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._mapped: dict[str, list[_Mapped]] = {}
        self._kept_bytes: dict[str, int] = {}  # Of tables that are kept in memory, by key.
        directory.mkdir(mode=0o700, exist_ok=True)

    @property
    def moment(self) -> int:
        """Moment of the latest snapshot whose rows may be in the files; 0 for none."""
        path = self._directory / _MOMENT
        try:
            return int(path.read_text()) if path.exists() else 0
        except ValueError as error:
            raise VariablesError("a file is damaged", where=str(path), got=str(error)) from None

    def make(self, key: str, kind: TableType) -> None:
        """Creates the files of a table, which are on disk then. `OSError` if there is no space."""
        size_bytes = sum(_size_bytes(*each) for each in kind.arrays().values())
        free_bytes = shutil.disk_usage(self._directory).free
        if kind.stddev and size_bytes > free_bytes:
            raise OSError(f"it needs {size_bytes} bytes on disk, and {free_bytes} are free")
        new = self._directory / f".{key}"
        remove(new)
        new.mkdir(mode=0o700)
        try:
            for name, (shape, dtype) in kind.arrays().items():
                with (new / f"{name}.npy").open("xb") as file:
                    file.write(_header(shape, dtype))
                    for rows in kind.noise() if name == "rows" else ():
                        file.write(rows.reshape(-1).view(np.uint8).data)
                    file.truncate(_HEADER_BYTES + _size_bytes(shape, dtype))
                    file.flush()
                    os.fsync(file.fileno())
            sync(new)
            remove(self._directory / key)  # A host crashed before a snapshot held it.
            new.rename(self._directory / key)
            sync(self._directory)
        except BaseException:
            remove(new)
            raise

    def open(self, key: str, kind: TableType) -> dict[str, np.ndarray]:
        """Maps the arrays of a table. What is written to them stays in memory of this process."""
        arrays, self._mapped[key] = {}, []
        for name, (shape, dtype) in kind.arrays().items():
            path = self._directory / key / f"{name}.npy"
            size_bytes = _HEADER_BYTES + _size_bytes(shape, dtype)
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != size_bytes:
                    raise OSError(f"{path} does not have {size_bytes} bytes")
                # With a reserve, it could not be larger than the memory.
                flags = mmap.MAP_PRIVATE | _WITHOUT_RESERVE
                prot = mmap.PROT_READ | mmap.PROT_WRITE
                mapped = mmap.mmap(file.fileno(), size_bytes, flags=flags, prot=prot)
            mapped.madvise(mmap.MADV_RANDOM)
            count = _size_bytes(shape, dtype) // dtype.itemsize
            arrays[name] = np.frombuffer(mapped, dtype, count, _HEADER_BYTES).reshape(shape)
            self._mapped[key].append(_Mapped(mapped, _size_bytes(shape[1:], dtype)))
        paths = [self._directory / key / f"{name}.npy" for name in arrays]
        maps = [each.map for each in self._mapped[key]]
        size_bytes = sum(each.nbytes for each in arrays.values())
        kept_bytes = sum(self._kept_bytes.values())
        if _AHEAD_BYTES < size_bytes <= _available_bytes() // 4 - kept_bytes:
            self._kept_bytes[key] = size_bytes
            reading = threading.Thread(target=_copy_into_memory, args=[paths, maps], daemon=True)
            reading.name = "stepcache tables"
            with contextlib.suppress(RuntimeError):  # The process is about to end.
                reading.start()
        return arrays

    def is_in_memory(self, key: str) -> bool:
        """Whether a table that is open is kept in memory."""
        return key in self._kept_bytes

    def zeros(self, count: int) -> np.ndarray:
        """Returns int64 zeros, mapped from an unnamed file so that the kernel can reclaim them."""
        if not count or not hasattr(os, "posix_fallocate"):
            return np.zeros(count, np.int64)
        with tempfile.TemporaryFile(dir=self._directory) as file:
            os.posix_fallocate(file.fileno(), 0, count * 8)  # Raises now if the disk is full.
            mapped = mmap.mmap(file.fileno(), count * 8)
        return np.frombuffer(mapped, np.int64)

    def merge(self, tables: dict[str, SavedTable], moment: int) -> None:
        """Writes the rows of a snapshot, which is on disk, to the files."""
        if tables:
            replace_file(self._directory / _MOMENT, str(moment))
        for table in tables.values():
            runs = list(_runs(table.ids))
            for name, rows in table.arrays.items() if runs else ():
                row_bytes = _size_bytes(rows.shape[1:], rows.dtype)
                data = rows.reshape(-1).view(np.uint8).data
                descriptor = os.open(self._directory / table.key / f"{name}.npy", os.O_WRONLY)
                try:
                    for first, last in runs:
                        place = _HEADER_BYTES + int(table.ids[first]) * row_bytes
                        write_at(descriptor, place, data[first * row_bytes : last * row_bytes])
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def free(self, table: HeldTable, ids: np.ndarray) -> None:
        """Frees the memory of pages of a table on which all rows are equal to those in the files.

        `ids` are rows on these pages, in order.
        """
        for mapped, row_bytes in self._mapped[table.key]:
            pages = _pages(ids, row_bytes)
            pages = pages[~_has_changed(pages, row_bytes, table)]
            for first, last in _runs(pages):
                begin, length = int(pages[first]) * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE
                mapped.madvise(mmap.MADV_DONTNEED, begin, length)

    def remove_others(self, keys: set[str]) -> None:
        """Removes the files of all other tables: no snapshot holds them."""
        for path in listed(self._directory):
            if path.name not in keys and (path.is_dir() or not keys):
                remove(path)


def _available_bytes() -> int:
    """Returns how much memory programs could still get; 0 if the system does not say, or has none.

    What the kernel keeps of files counts, as it gives that up first. It is at most what the limits
    of the control groups of this process leave, as that of a container.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMORY.read_text().splitlines() if hasattr(os, "posix_fadvise") else ():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) << 10, *_limits())
    return 0


def _limits() -> Iterator[int]:
    """Yields how much more memory each control group that holds this process may take."""
    yield MAX_TABLE_BYTES
    for line in _GROUPS.read_text().splitlines() if _GROUPS.exists() else ():
        _, controllers, group = line.split(":", 2)
        for controller in _LIMITS.keys() & set(controllers.split(",")):
            root, *names = _LIMITS[controller]
            for directory in (inner := root / group[1:], *inner.parents):
                with contextlib.suppress(OSError, ValueError):  # There may be none, or "max".
                    yield _left_bytes(directory, *names)


def _left_bytes(group: Path, limit: str, taken: str) -> int:
    """Returns how much more memory a control group may take; its limit if it does not say more.

    Raises `OSError` or `ValueError` if it has no limit.
    """
    limit_bytes = int((group / limit).read_text())
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Version 1 has a "total_" for a group with those in it, which version 2 always means.
        files = sum(int(rows.get(f"total_{kind}", rows.get(kind, 0))) for kind in _OF_FILES)
        taken_bytes = int((group / taken).read_text()) - files
        return max(0, limit_bytes - max(0, taken_bytes))
    return limit_bytes


def _copy_into_memory(paths: Sequence[Path], maps: Sequence[mmap.mmap]) -> None:
    """Reads the files of a table, and copies each page that is not yet a copy into its map."""
    with contextlib.suppress(OSError):  # The table may be gone.
        for path, mapped in zip(paths, maps, strict=True):
            with path.open("rb", buffering=0) as file:
                read = bytearray(_AHEAD_BYTES)
                while count := file.readinto(read):
                    with contextlib.suppress(OSError):  # The kernel may be too old to copy.
                        mapped.madvise(_POPULATE_WRITE, file.tell() - count, count)


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """Returns the header of an `.npy` file, padded to `_HEADER_BYTES`."""
    about = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    magic = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
    return magic + repr(about).encode().ljust(_HEADER_BYTES - 11) + b"\n"


def _size_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each run of consecutive numbers, given sorted ones."""
    if numbers.size:
        breaks = (np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()
        yield from zip([0, *breaks], [*breaks, numbers.size], strict=True)


def _pages(ids: np.ndarray, row_bytes: int) -> np.ndarray:
    """Returns the pages of a file that hold these rows, in order."""
    if not row_bytes or not ids.size:
        return np.empty(0, np.int64)
    first = (_HEADER_BYTES + ids * row_bytes) // mmap.PAGESIZE
    last = (_HEADER_BYTES + (ids + 1) * row_bytes - 1) // mmap.PAGESIZE
    steps = np.arange(int((last - first).max()) + 1)
    return np.unique(np.minimum(first[:, None] + steps, last[:, None]))


def _has_changed(pages: np.ndarray, row_bytes: int, table: HeldTable) -> np.ndarray:
    """Returns for each page whether it has rows that are newer than those in the files."""
    if not pages.size:
        return np.empty(0, bool)
    begin = pages * mmap.PAGESIZE - _HEADER_BYTES
    first, last = begin // row_bytes, (begin + mmap.PAGESIZE - 1) // row_bytes
    steps = np.arange(int((last - first).max()) + 1)
    rows = np.clip(first[:, None] + steps, 0, np.minimum(last, table.type.rows - 1)[:, None])
    return np.any(table.versions[rows] > table.base, axis=1)
