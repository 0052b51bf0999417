"""Ray's token can be read by its user alone."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.on_ray.auth_token import keep_private, make_private_token
from tandem.cluster.on_ray.runtime import start_ray


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
