"""Ray's token can be read by its user alone."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.on_ray.auth_token import check_token, keep_private, make_private_token
from tandem.cluster.on_ray.runtime import AUTO, connect_to_ray, import_ray, start_ray


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def open_umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    before = os.umask(0)
    yield
    os.umask(before)


def test_it_is_made_private_and_once(tmp_path: Path) -> None:
    token = tmp_path / ".ray" / "auth_token"
    make_private_token(tmp_path)
    made = token.read_text()
    assert (len(made), mode(token), mode(token.parent)) == (64, 0o600, 0o700)
    make_private_token(tmp_path)
    assert token.read_text() == made
    assert os.listdir(token.parent) == ["auth_token"]


def test_one_that_others_can_read_is_tightened_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = tmp_path / ".ray" / "auth_token"
    keep_private(tmp_path)  # there is none
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        make_private_token(tmp_path)
    assert (token.read_text(), mode(token)) == ("secret", 0o600)
    assert "could be read by other users" in caplog.text
    caplog.clear()
    keep_private(tmp_path)
    assert not caplog.text


def test_a_user_without_a_home_has_none_and_one_that_the_environment_names_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    keep_private(tmp_path / "file")
    monkeypatch.setattr(Path, "home", homeless)
    keep_private()
    assert not caplog.text
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    make_private_token(tmp_path)
    assert not (tmp_path / ".ray").exists()


@pytest.mark.parametrize("home", ["/dev/null", "/proc/x"])
def test_a_home_that_cannot_be_written_is_named_and_not_the_load(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 1000.0, 1000.0))
    with pytest.raises(Unavailable, match=r"Ray's token cannot be kept in ~/.ray.*Set HOME to a folder"):
        start_ray()


@contextmanager
def heads(*tokens: str) -> Iterator[list[str]]:
    """The addresses of servers that answer the first call of a process that joins as Ray's control store does, each for one token."""
    with ThreadPoolExecutor() as pool:
        servers = [grpc.server(pool, [_Head(token)]) for token in tokens]
        try:
            addresses = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" for server in servers]
            for server in servers:
                server.start()
            yield addresses
        finally:
            for server in servers:
                server.stop(0).wait()


class _Head(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, token: str) -> None:
        self._token = token

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        has = ("authorization", f"Bearer {self._token}") in [tuple(pair) for pair in details.invocation_metadata]

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if not has:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def of_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray keeps the token that it has read."""
    import_ray()
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # it is in no stub

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    AuthenticationTokenLoader.instance().reset_cache()
    yield
    AuthenticationTokenLoader.instance().reset_cache()


@pytest.mark.slow
@pytest.mark.usefixtures("of_ray")
def test_another_token_is_told_from_a_head_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: imports Ray, which would try for half a minute and print each try."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    with heads("mine", "theirs") as (mine, theirs):
        check_token(mine)
        with pytest.raises(ConfigurationError, match=f"the Ray at {theirs} does not accept this user's token"):
            connect_to_ray(theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("of_ray")
def test_a_user_without_a_token_is_told_where_one_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slow: imports Ray. No `tandem serve` has made one for this user yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with (
        heads("theirs") as (theirs,),
        pytest.raises(ConfigurationError, match=r"without its token.*~/\.ray/auth_token"),
    ):
        connect_to_ray(theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("of_ray")
def test_other_users_rays_on_this_machine_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: imports Ray."""
    from ray._private import services

    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    with heads("theirs", "his") as others:
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset(others))
        with pytest.raises(Unavailable, match=r"^Tandem does not run on this machine"):
            connect_to_ray(AUTO)
    with heads("theirs", "mine", "mine") as (theirs, *ours):
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset([theirs, *ours]))
        with pytest.raises(ConfigurationError, match=r"^2 Ray clusters run on this machine") as refusal:
            connect_to_ray(AUTO)
    assert theirs not in str(refusal.value)
