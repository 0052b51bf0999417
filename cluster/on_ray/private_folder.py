"""The folder of a Ray of our own: its sockets and logs, which Ray lets every user of the machine read, replace and delete."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

_LONGEST_SOCKET = 107  # the system's limit of a socket's path
# What Ray appends to its folder, with the longest process id.
_BELOW = len("/session_2026-11-30_19-06-41_702061_4194304/sockets/plasma_store")
_SYSTEM = Path("/tmp")


def private_folder() -> Path:
    """Returns a folder for Ray that other users cannot enter. It is in RAY_TMPDIR or TMPDIR, as Ray's own would be, or in /tmp if
    the path is too long for sockets or cannot be written, as on machines where each job has a folder of its own. Raises OSError."""
    named = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR")
    if named:
        with contextlib.suppress(OSError, _TooLong):
            return _made_in(Path(named).absolute())
    return _made_in(_SYSTEM)


class _TooLong(Exception):
    pass


def _made_in(where: Path) -> Path:
    if len(os.fsencode(where / "tandem-4294967295/ray")) + _BELOW > _LONGEST_SOCKET:
        raise _TooLong
    own = where / f"tandem-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():  # another user was there first
        own = Path(tempfile.mkdtemp(prefix="tandem-", dir=where))
    own.chmod(0o700)
    # One level lower, because Ray opens the folder that it is given to everyone.
    return own / "ray"
