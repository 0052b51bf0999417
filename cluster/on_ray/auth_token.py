"""Ray's token, which is a shell on every machine of its cluster: only its user may read it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_OTHERS = 0o077


def make_private_token(home: Path | None = None) -> None:
    """Makes `~/.ray/auth_token`, if Ray would: Ray writes it with the umask, so others could read it. Tightens one that others can
    read."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return None
    path = _token_path(home)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        return keep_private(home)
    # A file under the final name is whole: another command may be starting Ray at the same time.
    descriptor, made = tempfile.mkstemp(prefix=".auth_token-", dir=path.parent)  # 0600, whatever the umask is
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.unlink(made)


def keep_private(home: Path | None = None) -> None:
    """Tightens a token that others can read, and says so: they may have read it."""
    try:
        path = _token_path(home)
        found = path.stat()
        if not found.st_mode & _OTHERS:
            return
        path.chmod(0o600)
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # there is none, or this user has no home
        return
    except OSError as error:
        logger.warning("%s can be read by other users, and its mode cannot be changed: %s", path, error)
        return
    logger.warning(
        "%s could be read by other users, who could run programs as this one; now only its owner can. If others use this "
        "machine, remove the file while no Ray runs, so that a new one is made",
        path,
    )


def _token_path(home: Path | None) -> Path:
    return (home or Path.home()) / ".ray" / "auth_token"
