"""Where an export is written before it is put in place: beside its place, by one export at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .metadata import Kind

Progress = Callable[[str, int, int], None]


@contextmanager
def staged(directory: str | Path, *kinds: Kind, say: Progress) -> Iterator[Path]:
    """A folder to write models into, whose files go to their place together at the end if nothing was raised."""
    folder = Path(directory)
    if not str(directory) or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"export: directory must be a folder, got {str(directory)!r}")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, say) as alone:
        if alone:  # so these are of exports that were killed
            for left in folder.glob(".export.*.part"):
                shutil.rmtree(left, ignore_errors=True)
        part = Path(tempfile.mkdtemp(".part", ".export.", folder))
        try:
            yield part
            files = sorted(path.name for path in part.iterdir() if path.is_file())
            if taken := [name for name in files if (folder / name).is_dir()]:
                raise ValueError(f"export: directory must not hold a folder {taken[0]}, {folder} does")
            # Without its description a model does not load, so no mixture of two exports ever does.
            last = [kind.description for kind in kinds]
            for name in last:
                (folder / name).unlink(missing_ok=True)
            for name in sorted(files, key=last.__contains__):
                os.replace(part / name, folder / name)
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(folder: Path, say: Progress) -> Iterator[bool]:
    """Hold a folder's lock, which the system drops with the process; False where the file system has none."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another export into {folder}", 0, 1)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # as on some network file systems
            yield False
            return
        yield True
    finally:
        os.close(handle)


def save_model(model: Any, part: Path, kind: Kind, say: Progress) -> None:
    """Write a model and its data, each tensor made when its turn comes."""
    from onnx_ir import save

    def told(tensor: Any, info: Any) -> None:
        say("writing weights", info.index + 1, info.total)

    try:
        save(model, part / kind.model, external_data=kind.data, callback=told)
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(f"export: {part.parent}: {kind.data} cannot be written, is the disk full? ({error})") from error
