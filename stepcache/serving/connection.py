"""`Connection`: the variables and tables of a host, or of several that share one set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from stepcache.errors import OptionError, VariablesError
from stepcache.serving.hosts import Hosts, Versions
from stepcache.serving.lookup import Table
from stepcache.serving.messages import DTYPES, Status
from stepcache.serving.optimizers import export_rule, types_of
from stepcache.serving.read_ahead import ReadAhead
from stepcache.serving.row_cache import RowCache
from stepcache.serving.row_optimizers import RowOptimizer
from stepcache.serving.served import Served
from stepcache.serving.tables import MAX_ROWS, TableType
from stepcache.sharding import current_placer, processes_of
from stepcache.units import readable_bytes
from stepcache.variables.describing import Placing, check_not_tracing, describe, joined
from stepcache.variables.masters import Reader
from stepcache.variables.packing import Slot, layout_of
from stepcache.variables.policy import OnHost, Placement, Read, Replicated, Write, check_kinds
from stepcache.variables.variables import Variables

CACHE_ROWS = 65_536


class Connection:
    """A connection to the host or hosts of variables. Made by `connect`; a context manager.

    Attributes:
        address: as given.
        hosts: sends the requests.
    """

    def __init__(self, address: str, hosts: Hosts):
        self.address, self.hosts = address, hosts
        self._summing: list[Variables | Table] = []  # They add updates up (`every=k`).
        self._read_ahead = ReadAhead(hosts)

    def variables(
        self,
        name: str,
        tree: Any,
        *,
        placement: Placement = Replicated(),
        read: Read = Read(cache="device"),
        write: Write = Write(),
        replace_optimizer: bool = False,
    ) -> Variables:
        """Opens variables that the host holds; creates them from `tree` if they do not exist.

            params = connection.variables("params", init(), write=sc.Write(mode="add"))

        A step that takes the variables reads the newest version, which is moved only if this
        process has no copy of it. A step that carries them assigns its result, and raises if
        another process has written meanwhile. If several processes write, they must `push`.

        Args:
            name: name of the variables, the same in all processes.
            tree: a pytree of arrays: the initial value. If the variables exist, only its structure,
                shapes and dtypes count.
            placement: placement of the copies that steps read: `Replicated()` or `Sharded(rules)`.
            read: which copies a step may read. By default it reads the copy on the devices if that
                has the newest version, which each call checks by a message of some 100 bytes.
                `max_staleness` allows calls without this check.
            write: what `push` does. An optimizer is exported as a program, and runs on the host's
                CPU. Existing variables keep their optimizer; if it differs, there is an
                `OptimizerWarning`.
            replace_optimizer: replace the optimizer of existing variables by that of `write`. The
                value is kept, and the optimizer's state if its leaves have the same types.

        Raises:
            VariablesError: variables of this name exist with other leaves; or a leaf or the
                optimizer cannot be sent.
            OptionError: a policy has an option without effect here.
            ServerLostError: the host did not answer in time.
        """
        check_not_tracing("variables cannot be made", name)
        _check_name(name, "variables")
        _check_policies(placement, read, write, replace_optimizer)
        placing = Placing(name, name, placement, current_placer())
        structure, leaves, slots = describe(placing, tree)
        _check_leaves(name, slots)
        _check_alone(name)
        layout = layout_of(structure, slots)
        types = types_of([(slot.path, slot) for slot in slots])
        is_applied = write.mode == "apply"
        rule = export_rule(name, write.optimizer, structure, slots) if is_applied else b""
        version = self.hosts.open(name, types, leaves, self.hosts.described(name), rule)
        if rule:
            version = self.hosts.compare_optimizer(name, rule, replace_optimizer) or version
        master = Served(self, self.hosts, name, layout, read, version)
        made = Variables._over(master, name, placement, read, write)
        if write.every > 1:
            self._summing.append(made)
        return made

    def table(
        self,
        name: str,
        rows: int,
        shape: Sequence[int] = (),
        dtype: Any = np.float32,
        *,
        stddev: float = 0.0,
        seed: int = 0,
        optimizer: RowOptimizer = RowOptimizer(),
        read: Read = Read(),
        cache_rows: int = CACHE_ROWS,
        every: int = 1,
        replace_optimizer: bool = False,
    ) -> Table:
        """Opens a table of rows that the host holds; creates it if it does not exist.

            users = connection.table("users", 1_000_000, (64,), stddev=0.01,
                                     optimizer=sc.RowOptimizer("adagrad", 0.1))

        Args:
            name: name of the table, the same in all processes.
            rows: number of rows.
            shape, dtype: shape and dtype of one row.
            stddev, seed: the initial rows are normal noise of this standard deviation, which takes
                space on the host's disk; with 0 they are zeros, which take none until they are
                updated.
            optimizer: how `Table.push` applies an update to its rows.
            read: which copies of rows a lookup may use. By default none are kept. With
                `cache="device"`, copies of the rows looked up last are kept on the device, and only
                rows that were updated since are sent again. A copy serves for `max_staleness`
                lookups without asking the host.
            cache_rows: maximal number of these copies. A lookup of more rows does not use them.
            every: how many updates this process adds up before it sends them as one, each row once.
                `Table.flush` sends fewer.
            replace_optimizer: the optimizer replaces that of an existing table, which keeps its
                rows and its state. Its state must have the same arrays: those of "adagrad", of
                "adam", or none.

        Raises:
            OptionError: there can be no such table; `read` has an option without effect here;
                `cache_rows` or `every` is not positive; or `every` is above 1 and the optimizer is
                "assign".
            VariablesError: another table of this name exists, or the host has no space for it.
            ServerLostError: the host did not answer in time.
        """
        check_not_tracing("a table cannot be made", name)
        _check_name(name, "table")
        _check_table_type(rows, shape, np.dtype(dtype), optimizer, stddev, seed)
        _check_table_policy(read, cache_rows, np.dtype(dtype))
        _check_every(every, optimizer)
        sizes = [int(size) for size in shape]
        row = (int(rows), sizes, np.dtype(dtype).name, float(stddev), int(seed))
        kind = TableType(*row, optimizer)
        cache = None
        if read.cache is not None:
            cache = RowCache(read, max(min(cache_rows, kind.rows), 1), sizes, np.dtype(dtype))
        table = Table(self.hosts, name, kind, cache, every, replace_optimizer)
        if every > 1:
            self._summing.append(table)
        return table

    def read_together(self, readers: Sequence[tuple[Any, Reader]], *, values: bool) -> None:
        """Asks for the versions of several variables in one request, and fetches values.

        The values of one host are of one moment. Nothing is asked if copies of one moment may serve
        all readers.

        Args:
            readers: the masters, each with its reader.
            values: whether to fetch the values that the readers lack.

        Raises:
            VariablesError: the host refuses this read, or one in the background for this call.
            ServerLostError: the host did not answer in time.
        """
        jobs = [master.take_job() for master, _ in readers]
        for (master, _), job in zip(readers, jobs, strict=True):
            if job is not None:
                master.arrived(self._read_ahead.finish(job, master))
        names, known, kept = zip(
            *(master.lookup(reader) for master, reader in readers), strict=True
        )
        if all(kept) and _are_of_one_moment(kept):
            for master, _ in readers:
                master.receive(None, None)
            return
        versions, leaves = self.hosts.read(names, known, values=values)
        for (master, _), *row in zip(readers, versions, leaves, strict=True):
            master.receive(*row)

    def read_ahead(self, readers: Sequence[tuple[Any, Reader]]) -> None:
        """Reads in the background the values for which no copy may serve the next call."""
        if not (ahead := [row for row in readers if row[0].reads_ahead(row[1])]):
            return
        masters = [master for master, _ in ahead]
        names, known, _ = zip(*(master.lookup(reader) for master, reader in ahead), strict=True)
        job = self._read_ahead.start(masters, names, known)
        for master in masters:
            master.started(job)

    def status(self, host: int = 0) -> Status:
        """Returns contents and counters of a host. `Status.hosts` is the number of hosts."""
        return self.hosts.status(host)

    def flush(self) -> None:
        """Waits until snapshots on disk hold all updates that this process has pushed.

        Sends the sums of `every=k` first.

        Raises:
            ServerLostError: there was no snapshot in time.
        """
        self._write_sums()
        self.hosts.flush()

    def close(self) -> None:
        """Sends the sums of `every=k`, and closes the connection.

        Waits, for `timeout` at most, until a snapshot or an image has all writes of this process,
        and logs after 5 s that it waits. If there is none in time, the log says so; writes that it
        would have are lost if the host crashes, or has crashed.

        Raises:
            VariablesError: the host refuses a sum; the others are sent.
            ServerLostError: the host did not answer in time. The connection is closed all the same.
        """
        try:
            self._write_sums()
        finally:
            self.hosts.close()

    def _write_sums(self) -> None:
        refused: list[VariablesError] = []
        for each in self._summing:
            try:
                each.flush()
            except VariablesError as error:  # Those after it are sent.
                refused.append(error)
        if refused:
            raise refused[0]

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:  # Sums of a failed iteration are not sent.
            self.hosts.close()

    def __repr__(self) -> str:
        return f"Connection({self.address!r})"


def _are_of_one_moment(versions: Iterable[Versions]) -> bool:
    """Returns whether, on each host, the versions were the newest at the same moment."""
    rows = [row for version in versions for row in version.items()]
    moments = {(host, part.epoch, part.moment) for host, part in rows}
    return len(moments) == len({host for host, _ in rows})


def _check_policies(placement: Placement, read: Read, write: Write, replaces: bool) -> None:
    check_kinds(placement, read, write)
    if isinstance(placement, OnHost):
        raise OptionError(
            "the host's process holds the master copy",
            where="variables(placement=...)",
            expected="Replicated() or Sharded(rules), for the copies that steps read",
            got=repr(placement),
        )
    if replaces and write.mode != "apply":
        raise OptionError(
            "replace_optimizer=True would do nothing: `write` has no optimizer",
            where="variables(write=...)",
            got=repr(write),
        )


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str) or not name:
        raise OptionError("no name", where=where, expected="a nonempty str", got=repr(name))


def _check_table_type(
    rows: Any, shape: object, dtype: np.dtype, optimizer: object, stddev: Any, seed: Any
) -> None:
    def are_counts(sizes: Any, least: int) -> bool:
        return all(isinstance(each, int | np.integer) and each >= least for each in sizes)

    is_optimizer = isinstance(optimizer, RowOptimizer)
    takes_gradients = is_optimizer and optimizer.learning_rate > 0
    is_float = jax.numpy.issubdtype(dtype, np.inexact)
    numbers = "float32 or another type of floats" if takes_gradients else "a type of numbers"
    is_count = are_counts([rows], 1) and rows <= MAX_ROWS
    is_shape = isinstance(shape, Sequence) and are_counts(shape, 0)
    is_spread = isinstance(stddev, int | float | np.number) and 0 <= stddev < math.inf
    for argument, given, is_legal, expected in (
        ("rows", rows, is_count, f"the number of rows, an int from 1 to {MAX_ROWS:,}"),
        ("shape", shape, is_shape, "the shape of one row, such as (64,)"),
        ("optimizer", optimizer, is_optimizer, 'a RowOptimizer, such as RowOptimizer("adam", 0.1)'),
        ("stddev", stddev, is_spread, "a standard deviation: a number ≥ 0"),
        ("seed", seed, are_counts([seed], 0) and seed < 1 << 62, "an int ≥ 0"),
        ("dtype", dtype, dtype.name in DTYPES and (is_float or not takes_gradients), numbers),
    ):
        if not is_legal:
            raise OptionError(
                f"a table cannot be made: {argument} is invalid",
                where=f"table({argument}=...)",
                expected=expected,
                got=repr(given),
            )


def _check_count(name: str, given: object, counted: str) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        what, expected = f"{name} counts {counted}", "an int ≥ 1"
        raise OptionError(what, where="table", expected=expected, got=repr(given))


def _check_every(every: int, optimizer: RowOptimizer) -> None:
    _check_count("every", every, "updates")
    if every > 1 and optimizer.name == "assign":
        raise OptionError(
            f"every={every} contradicts the optimizer: values to assign cannot be added up",
            where="table",
        )


def _check_table_policy(read: Read, cache_rows: int, dtype: np.dtype) -> None:
    check_kinds(Replicated(), read, Write())
    _check_count("cache_rows", cache_rows, "rows")
    if read.cache is None and cache_rows != CACHE_ROWS:
        raise OptionError(
            f"cache_rows={cache_rows} would do nothing: no rows are kept",
            where="table",
            hint='set read=sc.Read(cache="device")',
        )
    if read.cache is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise OptionError(
            f"JAX would keep rows of {dtype} as {jax.dtypes.canonicalize_dtype(dtype)}",
            where="table(read=...)",
            hint="set jax_enable_x64, or leave out the cache",
        )


def _check_alone(name: str) -> None:
    placer = current_placer()
    if placer is not None and len(processes_of(placer.mesh.devices.flat)) > 1:
        raise VariablesError(
            "served variables are not supported on a mesh of several processes",
            where=name,
            hint="make a session over the devices of each process",
        )


def _check_leaves(name: str, slots: Sequence[Slot]) -> None:
    for slot in slots:
        dtype = getattr(slot.dtype, "name", str(slot.dtype))
        if dtype not in DTYPES:
            raise VariablesError(
                "a leaf of this type cannot be served",
                where=joined(name, slot.path),
                expected="numbers; of random keys, their jax.random.key_data",
                got=f"{dtype}{list(slot.shape)}, {readable_bytes(slot.size_bytes)}"
                if hasattr(slot.dtype, "itemsize")
                else dtype,
            )
