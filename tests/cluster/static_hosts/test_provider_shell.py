"""The arguments that `ssh` gets. A fake ssh on the PATH records them and runs the command here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster.static_hosts.shell import (
    HostUnreachable,
    LocalShell,
    ScriptFailed,
    SshSettings,
    SshShell,
    ThroughHead,
)

AWKWARD = "it's a \"test\" of $HOME; 'nested' \\ `date` (*)"
SETTINGS = SshSettings("ubuntu", "~/key")


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hosts that begin with `dead` do not answer. Returns the file with the arguments of every call."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
        printf '%s\\n' "$*" | head -n 1 >>{calls}
        for word; do host=$command; command=$word; done
        case $host in *@dead*) echo "ssh: connect to host $host port 22: Connection timed out" >&2; exit 255 ;; esac
        exec sh -c "$command"
        """
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return calls


def through_head(head: str = "head") -> ThroughHead:
    return ThroughHead(SshShell(SETTINGS), head, SshSettings("ubuntu", "~/ray_bootstrap_key.pem"))


@pytest.mark.usefixtures("ssh")
@pytest.mark.parametrize("shell", [LocalShell(), SshShell(SETTINGS), through_head()], ids=["here", "ssh", "head"])
def test_a_script_arrives_as_it_was_written_and_one_that_fails_says_how_and_where(shell: LocalShell) -> None:
    assert shell.run("host", 'cat; printf %s "$0" >&2', stdin=AWKWARD.encode()) == AWKWARD.encode()
    quoted = AWKWARD.replace("'", "'\\''")
    assert shell.run("host", f"printf %s '{quoted}'") == AWKWARD.encode()
    with pytest.raises(ScriptFailed, match=r"host: no such pool$") as caught:
        shell.run("host", "echo first; echo no such pool >&2; exit 3")
    assert caught.value.status == 3


@pytest.mark.usefixtures("ssh")
def test_a_host_that_does_not_answer_is_unreachable_and_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostUnreachable, match=r"ubuntu@dead-1 does not answer over ssh: .*timed out"):
        SshShell(SETTINGS).run("dead-1", "true")
    with pytest.raises(HostUnreachable, match=r"^dead-1 does not answer the head"):
        through_head().run("dead-1", "true")
    with pytest.raises(HostUnreachable, match=r"^ubuntu@dead-head does not answer over ssh"):
        through_head("dead-head").run("host", "true")
    with pytest.raises(HostUnreachable, match="did not answer within"):
        SshShell(SETTINGS).run("host", "exec sleep 60", timeout_s=0.2)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostUnreachable, match="ssh cannot be started here"):
        SshShell(SETTINGS).run("host", "true")


def test_ssh_asks_no_questions_and_uses_the_key_and_the_way_in_that_it_was_given(ssh: Path) -> None:
    SshShell(SshSettings("ubuntu", "~/key", "nc -x gate %h %p")).run("host", "true")
    SshShell(SshSettings("ubuntu")).run("host", "true")
    given, without = ssh.read_text().splitlines()
    for words in ("BatchMode=yes", "ConnectTimeout=5", "-i ~/key", "ProxyCommand=nc -x gate %h %p", "ubuntu@host"):
        assert words in given
    assert " -i " not in without
    assert "IdentitiesOnly" not in without, "ssh finds its own key"
