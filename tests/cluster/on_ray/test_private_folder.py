"""Where a Ray of our own keeps its sockets and logs: no other user can enter, and the paths are short enough for sockets."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.base.errors import Unavailable
from tandem.cluster.on_ray.private_folder import private_folder
from tandem.cluster.on_ray.runtime import import_ray, start_ray

NAME = f"tandem-{os.getuid()}"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a path as short as those of real machines, named by TMPDIR."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_no_other_user_can_enter_it_whatever_the_umask_is(short: Path) -> None:
    before = os.umask(0)
    try:
        assert private_folder() == short / NAME / "ray"
        (short / NAME).chmod(0o755)
        assert private_folder() == short / NAME / "ray"
    finally:
        os.umask(before)
    assert stat.S_IMODE((short / NAME).stat().st_mode) == 0o700


def test_a_link_that_another_user_put_there_first_is_not_followed(short: Path) -> None:
    elsewhere = short / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    (short / NAME).symlink_to(elsewhere)
    assert private_folder().parent.parent == short
    assert private_folder().parent != short / NAME
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


def test_where_the_path_is_too_long_for_a_socket_it_is_in_tmp(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on machines where each job has a folder of its own. Ray would not start."""
    job = short / "users/firstname.lastname/scratch/job-123456"
    job.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(job))
    assert private_folder() == Path("/tmp") / NAME / "ray"


@pytest.mark.parametrize("named", ["/nonexistent", "/dev/null"])
def test_where_nothing_can_be_written_it_is_in_tmp(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", named)
    assert private_folder() == Path("/tmp") / NAME / "ray"


@pytest.mark.slow
def test_ray_is_started_there_and_its_logs_are_named(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: imports Ray."""
    given: list[object] = []

    def refuse(**options: object) -> None:
        given.append(options["_temp_dir"])
        raise RuntimeError("no")

    monkeypatch.setattr(import_ray(), "init", refuse)
    with pytest.raises(Unavailable, match=rf"Ray's logs are in {short / NAME / 'ray'}/session_latest/logs"):
        start_ray()
    assert given == [str(short / NAME / "ray")]
