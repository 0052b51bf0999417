from __future__ import annotations

from pathlib import Path

import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.saving import check_picture, results_folder


def test_a_folder_for_results_need_not_be_there(tmp_path: Path) -> None:
    folder = results_folder(tmp_path / "results" / "today")
    check_picture(folder / "outcome.png", "--out")
    assert results_folder(folder) == folder


def test_one_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    with pytest.raises(ConfigurationError, match=r"--out .* cannot be created"):
        results_folder(tmp_path / "results" / "today")


@pytest.mark.parametrize("name", ["nowhere/run.png", "run.jpg"])
def test_a_picture_that_could_not_be_saved_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        check_picture(tmp_path / name, "--plot")
