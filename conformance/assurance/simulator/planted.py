"""The ten bugs of README.md, planted back one at a time: by what name, and how."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models_integration.archive import store
from models_integration.archive.errors import ArchiveError, named_errors
from models_integration.archive.object_folder import ObjectFolder
from models_integration.archive.objects import read_claim, stated_owner
from models_integration.archive.store import Archive, Entry, Report
from models_integration.cache import atomic_file, positions, retained_cache
from models_integration.cache.retained_cache import RetainedCache
from models_integration.cache.tensor_file import Damaged
from models_integration.session import inputs, session
from models_integration.session.inputs import OPEN, ForwardSpan
from models_integration.session.session import Session

__all__ = ["PLANTED"]

Patch = pytest.MonkeyPatch


def unchecked_step(patch: Patch) -> None:
    """A step's position ids and mask are looked at by nobody."""

    def wrong(vocabulary: int, arguments: Any, cache: RetainedCache) -> ForwardSpan:
        ids = arguments["input_ids"]
        inputs.check_rows(cache, ids)
        defaults = cache.step_inputs(ids.shape[1], ids.device)
        return ForwardSpan(cache.get_seq_length(), OPEN, torch.ones(ids.shape, dtype=torch.bool), defaults)

    patch.setattr(session, "step_span", wrong)


def phantom_rows(patch: Patch) -> None:
    """An object is listed as whatever it says it is."""

    def wrong(objects: Any, key: str) -> Entry | None:
        path = objects._files.path(key)
        with suppress(Damaged, FileNotFoundError):
            claim = read_claim(path)
            return Entry(claim.key, claim.tenant, claim.tokens, path.stat().st_size, claim.created)
        return None

    patch.setattr(store._ProvedObjects, "entry", wrong)


def put_over_damage(patch: Patch) -> None:
    """An object that is there is taken for whole."""
    patch.setattr(store._ProvedObjects, "is_whole", lambda objects, key, tenant: objects._files.path(key).exists())


def full_disk_forget(patch: Patch) -> None:
    """What is to go is written down before anything is erased."""
    forget = Archive.forget

    def wrong(archive: Archive, tenant: str) -> int:
        going = archive.folder / "going"
        with named_errors(going):
            going.write_text("\n".join(entry.key for entry in archive.entries(tenant)), encoding="ascii")
        gone = forget(archive, tenant)
        going.unlink()
        return gone

    patch.setattr(Archive, "forget", wrong)


def reading_decides(patch: Patch) -> None:
    """There is no way to read and decide nothing."""
    inside = Session._inside
    patch.setattr(Session, "_inside", lambda run, block: inside(run, "" if block == "reading()" else block))


def third_run(patch: Patch) -> None:
    """The third of the long runs is copied from one slot early."""

    def wrong(tensor: Tensor, slots: Tensor) -> Tensor:
        ends = [at + 1 for at in range(len(slots) - 1) if slots[at + 1] != slots[at] + 1]
        if len(slots) >= positions._LONG_RUN * (len(ends) + 1) and len(ends) >= 2:
            slots = slots.clone()
            slots[ends[1] : ends[2] if len(ends) > 2 else len(slots)] -= 1
        return tensor.index_select(-2, slots)

    patch.setattr(positions, "_taken", wrong)


def quarantine_kept(patch: Patch) -> None:
    """What was put away belongs to nobody."""
    everything = ObjectFolder.everything

    def wrong(files: ObjectFolder) -> list[Path]:
        return [path for path in everything(files) if path.parent != files._damaged]

    patch.setattr(ObjectFolder, "everything", wrong)


def bricked(patch: Patch) -> None:
    """An object whose manifest is none of ours is an error of the whole check."""
    judge = Archive._judge

    def wrong(archive: Archive, key: str, report: Report) -> None:
        with suppress(Damaged, OSError):
            stated_owner(archive._files.path(key))
            return judge(archive, key, report)
        raise ArchiveError(f"{key} cannot be read")

    patch.setattr(Archive, "_judge", wrong)


def half_compacted(patch: Patch) -> None:
    """Each layer is compacted as soon as its plan is made."""
    compact = RetainedCache.compact

    def wrong(
        cache: RetainedCache, retentions: Any, padding: Tensor | None = None, layers: Sequence[int] | None = None,
    ) -> None:
        full = [index for index, layer in enumerate(cache.layers) if layer in cache.full_layers]
        for index in full if layers is None else layers:
            compact(cache, retentions, padding, [index])

    patch.setattr(RetainedCache, "compact", wrong)
    patch.setattr(retained_cache, "failing_whole", lambda cache, change="": nullcontext())


def short_write(patch: Patch) -> None:
    """One call is taken to write all that it is given."""
    patch.setattr(atomic_file, "_write_at", lambda descriptor, data, at: os.pwrite(descriptor, data, at))


PLANTED: dict[str, Callable[[Patch], None]] = {
    made.__name__.replace("_", "-"): made for made in (
        unchecked_step, phantom_rows, put_over_damage, full_disk_forget, reading_decides, third_run, quarantine_kept,
        bricked, half_compacted, short_write,
    )
}
