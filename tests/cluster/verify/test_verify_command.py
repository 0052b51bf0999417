"""What `tandem verify` answers when it cannot compare. Its comparisons are in tests/integration/test_verify.py, with real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster.cli import main

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", NOWHERE], "--url must be given twice, for the two servers to compare, not 1 times"),
        (["--url", NOWHERE, "--url", NOWHERE, "-o", "json"], "http://127.0.0.1:9 does not answer"),
        (["--url", NOWHERE, "--url", NOWHERE, "--at-once", "0"], "--at-once must be from 1 to 256, not 0"),
        (["--url", NOWHERE, "--url", NOWHERE, "--max-tokens", "0"], "--max-tokens must be at least 1, not 0"),
        (["--url", NOWHERE, "--url", NOWHERE, "--timeout", "0"], "--timeout must be from 0 to 1e+06 seconds"),
        (["--url", NOWHERE, "--request", "b"], "--request needs a receipt and one server"),
        (["r", "--url", NOWHERE, "--request", "b"], "r cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_compared_ends_with_2_and_says_why(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err
