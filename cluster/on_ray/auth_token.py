"""Ray's token, which is a shell on every machine of its cluster: only its user may read it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
from pathlib import Path

from tandem.base.errors import ConfigurationError

logger = logging.getLogger(__name__)

_OTHERS = 0o077
_WHERE = "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
_FIRST_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # of every process that joins; it changes nothing
_ANSWER_S = 3.0


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


def check_token(address: str) -> None:
    """Raises ConfigurationError if the Ray at this address does not accept this user's token, or if there is none. Ray itself would try for
    half a minute, print each try, and then say that nothing answers. Ray must have been imported."""
    import grpc
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # it is in no stub
    from ray.exceptions import AuthenticationError

    try:
        token = AuthenticationTokenLoader.instance().get_token_for_http_header()
    except AuthenticationError as error:
        said = str(error).partition(". ")[0].rstrip(".")
        raise ConfigurationError(
            f"the Ray at {address} cannot be joined without its token: {said}. Put the token of the user who started it into {_WHERE}"
        ) from error
    if os.environ.get("RAY_USE_TLS") == "1":
        return
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_FIRST_CALL)(b"", timeout=_ANSWER_S, metadata=[*token.items()])
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigurationError(
                    f"the Ray at {address} does not accept this user's token: another user started it, or it has another token. Put that one "
                    f"into {_WHERE}"
                ) from error


def _token_path(home: Path | None) -> Path:
    return (home or Path.home()) / ".ray" / "auth_token"
