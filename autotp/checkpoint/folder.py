"""A directory that is replaced as a whole: whoever looks sees the old one or the new one.

The new one is written beside the old one, hidden, and takes its name at the end. A crash before
that leaves the old one as it was, and the hidden one to be deleted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replaced(path: Path, written: Callable[[str], bool]) -> Iterator[Path]:
    """A new directory to write to, which replaces `path` if the block ends without an error.

    Other files in `path` are taken along: all but those whose names `written` says are the kind
    that is written here.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, "a file is in the place of the directory", str(path)
        )
    new = path.parent / f".{path.name}.saving-{uuid4().hex[:12]}"
    new.mkdir()
    try:
        yield new
        _to_disk(new)
        _take_place(new, path, written)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # what is left of it, or the old directory
    _sync(path.parent)


def _take_place(new: Path, path: Path, written: Callable[[str], bool]) -> None:
    try:
        os.rename(new, path)  # replaces an empty directory too
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    made = {entry.name for entry in new.iterdir()}

    def ours(folder: str, names: list[str]) -> list[str]:
        top = Path(folder) == path
        return [name for name in names if top and (name in made or written(name))]

    shutil.copytree(path, new, symlinks=True, ignore=ours, copy_function=_link, dirs_exist_ok=True)
    _exchange(new, path)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # this file system has no hard links
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def _exchange(new: Path, path: Path) -> None:
    """Swap two directories: at once where the system can, else in two steps."""
    libc = ctypes.CDLL(None, use_errno=True)
    rename = getattr(libc, "renameat2", None)  # Linux; Python has no call for it
    if rename is not None:
        names = os.fsencode(new), os.fsencode(path)
        if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
    old = new.with_name(f"{new.name}-old")
    os.rename(path, old)
    os.rename(new, path)
    os.rename(old, new)


def _to_disk(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
