"""Programs on the move: out of one directory, in a bundle, into another."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepcache.errors import StepCacheError
from stepcache.programs.archive import CANDIDATES_KEPT, Archive
from stepcache.report import bundle as bundles
from stepcache.report import environment
from stepcache.report.bundle import BundledStep, Content, Opened, Writer
from stepcache.report.environment import Part
from stepcache.report.inventory import label_of, means
from stepcache.storage.dependency_record import Candidate, pack_candidates, unpack_candidates
from stepcache.storage.disk_store import DiskTier, EntryInfo
from stepcache.storage.entry import DamagedEntryError, read_payload


class BundleError(StepCacheError):
    """A bundle cannot be written, or is refused."""


class UntrustedBundleError(BundleError):
    """Another directory made the bundle, and nobody has said that its maker is trusted."""


class ForeignBundleError(BundleError):
    """No step in the bundle was built for this environment.

    Attributes:
        parts: what differs, for the step that differs least.
    """

    def __init__(self, what: str, parts: Sequence[Part], **details: Any):
        super().__init__(what, **details)
        self.parts = tuple(parts)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was put into a bundle.

    Attributes:
        file: its path.
        steps: labels of the steps, one for each entry.
        programs: how many programs.
        size_bytes: size of the file.
        left_out: what was not put in, and why.
    """

    file: str
    steps: tuple[str, ...]
    programs: int
    size_bytes: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """What came out of a bundle.

    Attributes:
        file: its path.
        steps: labels of the steps that were taken, one for each entry.
        programs: how many programs were taken.
        already_there: how many programs were there before.
        refused: labels of the steps that were built for another environment.
        foreign: what differs, for those: part, bundle, here.
        settings: what a process has to set otherwise than this one to find what was taken.
        trusted: "own key", or "as asked".
    """

    file: str
    steps: tuple[str, ...]
    programs: int
    already_there: int
    refused: tuple[str, ...]
    foreign: tuple[Part, ...]
    settings: tuple[Part, ...]
    trusted: str


def export(archive: Archive, file: Path, wanted: Sequence[str] = ()) -> Exported:
    """Writes a bundle, whole or not at all.

    Args:
        archive: where the programs are.
        file: path of the bundle; what is there is replaced.
        wanted: names, labels or digests of steps; empty for everything.

    Raises:
        BundleError: there is nothing to put in, or the file cannot be written.
    """
    left_out: list[str] = []
    try:
        with bundles.replacing(file) as out:
            writer = Writer(out)
            steps = _write_entries(writer, archive, wanted, left_out)
            if not writer.headers:
                raise BundleError(
                    "There is nothing to export",
                    where=str(archive.tier.directory),
                    got="; ".join(left_out) or None,
                    hint="stepcache cache ls shows what there is",
                )
            writer.finish(archive.tier)
            size_bytes = out.tell()
    except OSError as error:
        why = error.strerror or str(error)
        raise BundleError(f"The bundle cannot be written: {why}", where=str(file)) from None
    programs = len(writer.headers) - len(steps)
    return Exported(str(file), tuple(steps), programs, size_bytes, tuple(left_out))


def _write_entries(
    writer: Writer, archive: Archive, wanted: Sequence[str], left_out: list[str]
) -> list[str]:
    """Programs first, then the steps whose programs are sound. Returns the labels of the steps."""
    tier = archive.tier
    steps = list(_chosen_steps(archive, wanted, left_out))
    named = {each.program for step in steps for each in step.candidates}
    for entry in tier.entries("program"):
        if entry.digest in named or not wanted or _is_wanted(entry, wanted):
            info, payload = tier.peek("program", entry.digest)
            if info is None or info.problem is not None:
                why = info.problem if info is not None else "it is gone"
                left_out.append(f"program {entry.digest[:12]}: {why}")
                continue
            writer.add("program", info.digest, info.created_time or 0.0, info.header or {}, payload)
    sound = {header.digest for header in writer.headers}
    labels = []
    for step in steps:
        candidates = [each for each in step.candidates if each.program in sound]
        if not candidates:
            left_out.append(f"{step.label}: its programs are not there any more")
            continue
        about, payload = pack_candidates(step.label, candidates)
        writer.add("step", step.digest, candidates[0].created_time, about, payload)
        labels.append(step.label)
    return labels


def _is_wanted(entry: EntryInfo, wanted: Sequence[str]) -> bool:
    return any(means(label_of(entry), each) or entry.digest.startswith(each) for each in wanted)


def _chosen_steps(
    archive: Archive, wanted: Sequence[str], left_out: list[str]
) -> Iterator[BundledStep]:
    for entry in archive.tier.entries("step"):
        if wanted and not _is_wanted(entry, wanted):
            continue
        info, payload = archive.tier.peek("step", entry.digest)
        if info is None or info.problem is not None:
            why = info.problem if info is not None else "it is gone"
            left_out.append(f"step {entry.digest[:12]}: {why}")
            continue
        try:
            candidates = unpack_candidates(payload)
        except ValueError as error:
            left_out.append(f"{label_of(entry)}: it is malformed: {error}")
            continue
        if candidates:
            yield BundledStep(entry.digest, label_of(entry), candidates)
        else:
            left_out.append(f"{label_of(entry)}: another version of stepcache stored it")


def take(
    open_archive: Callable[[], Archive], file: Path, *, trust: bool = False, anyway: bool = False
) -> Imported:
    """Stores what is in a bundle.

    Args:
        open_archive: opens the directory that it goes to; called when the bundle is whole.
        file: path of the bundle.
        trust: whoever made it may run code here.
        anyway: store even what was built for another environment. It does no harm: it is not found.

    Raises:
        UntrustedBundleError: another directory made it, and `trust` is not given.
        ForeignBundleError: nothing in it was built for this environment.
        BundleError: it is damaged or malformed, or cannot be read or stored.
    """
    try:
        with file.open("rb") as opened:
            bundle = bundles.opened(opened)
            archive = open_archive()
            trusted = _check_trust(bundle, archive.tier, file, trust)
            content = bundles.content(bundle)
            return _store(bundle, content, archive, file, trusted, anyway)
    except (DamagedEntryError, OSError) as error:
        why = str(error) if isinstance(error, DamagedEntryError) else error.strerror or str(error)
        raise BundleError(f"The bundle is refused: {why}", where=str(file)) from None


def _check_trust(bundle: Opened, tier: DiskTier, file: Path, trust: bool) -> str:
    if hmac.compare_digest(tier.vouch(bundles.PURPOSE + bundle.sha256), bundle.vouched):
        return "own key"
    if trust:
        return "as asked"
    raise UntrustedBundleError(
        "The bundle was made with the key of another directory. Programs are code: importing it "
        "lets whoever made it run code as you",
        where=str(file),
        hint="if you trust its maker, and the way it came here, add --trust",
    )


def _store(
    bundle: Opened, content: Content, archive: Archive, file: Path, trusted: str, anyway: bool
) -> Imported:
    own = environment.here() if content.steps else {}
    foreign = {step.digest: _foreign(step, own) for step in content.steps}
    taken = [step for step in content.steps if anyway or not foreign[step.digest]]
    if content.steps and not taken:
        raise ForeignBundleError(
            "The bundle was built for another environment: its programs would not be found here",
            min(foreign.values(), key=len),
            where=str(file),
            hint="--anyway stores them all the same",
        )
    refused = [step for step in content.steps if step not in taken]
    stored, there = _store_programs(bundle, content, archive.tier, _programs(refused, taken))
    for step in taken:
        _publish(archive.tier, "step", step.digest, *_merged(archive.tier, step))
    return Imported(
        str(file),
        tuple(step.label for step in taken),
        stored,
        there,
        tuple(step.label for step in refused),
        _distinct(foreign.values()),
        _distinct(environment.settings_that_differ(step.candidates[0].told, own) for step in taken),
        trusted,
    )


def _foreign(step: BundledStep, own: dict[str, str]) -> list[Part]:
    """What keeps all builds of a step from serving here, told of the one that comes nearest."""
    each = (environment.foreign_parts(candidate.told, own) for candidate in step.candidates)
    return min(each, key=len)


def _distinct(parts: Iterable[Iterable[Part]]) -> tuple[Part, ...]:
    return tuple(dict.fromkeys(part for some in parts for part in some))


def _programs(refused: list[BundledStep], taken: list[BundledStep]) -> set[str]:
    """The programs that only steps which are refused need."""
    needed = {each.program for step in taken for each in step.candidates}
    return {each.program for step in refused for each in step.candidates} - needed


def _store_programs(
    bundle: Opened, content: Content, tier: DiskTier, unneeded: set[str]
) -> tuple[int, int]:
    """Returns how many were stored, and how many were there already: those are left as they are."""
    stored, there = 0, 0
    for digest, (header, place) in content.programs.items():
        if digest in unneeded:
            continue
        if tier.read("program", digest) is not None:
            there += 1
            continue
        bundle.file.seek(place)
        _publish(tier, "program", digest, header.about, read_payload(bundle.file, header))
        stored += 1
    return stored, there


def _merged(tier: DiskTier, step: BundledStep) -> tuple[dict[str, Any], bytes]:
    """A step's entry with the builds that were there already, the latest first."""
    entry = tier.read("step", step.digest)
    known: list[Candidate] = []
    if entry is not None:
        with contextlib.suppress(ValueError):
            known = unpack_candidates(entry.payload)
    facts = {each.facts for each in known}
    both = known + [each for each in step.candidates if each.facts not in facts]
    both.sort(key=lambda candidate: -candidate.created_time)
    return pack_candidates(step.label, both[:CANDIDATES_KEPT])


def _publish(tier: DiskTier, kind: str, digest: str, about: dict[str, Any], payload: bytes) -> None:
    if not tier.publish(kind, digest, about, payload):
        raise BundleError(
            f"{kind} {digest[:12]} cannot be stored",
            where=str(tier.directory),
            hint="stepcache doctor says what is wrong with the directory",
        )
