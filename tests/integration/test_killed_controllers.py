"""The controller is killed and stopped under load, again and again: no request fails, no node is lost, and no command takes the
controller's silence for its end. TANDEM_CONTROLLER_KILLS says how often."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster_lab import MODEL, START_S, Load, RayNodes, Serve, Tandem, free_port, until_true
from tests.integration.test_serve_command import epochs

KILLS = int(os.environ.get("TANDEM_CONTROLLER_KILLS", "2"))
STOP_S = 3.0
CLIENTS = 4
BACK_S = 60.0
CONTROLLER = "ray::ControllerActor"

pytestmark = pytest.mark.timeout(600 + 40 * KILLS)

Processes = Callable[[], dict[int, str]]


def controllers(processes: Processes) -> set[int]:
    return {pid for pid, command in processes().items() if command.startswith(CONTROLLER)}


def kill_again_and_again(url: str, model: str, processes: Processes) -> None:
    """Kills the controller several times under load, then stops it once. A new one must start each time, and no request may fail."""
    before = epochs(url)
    assert len(before) == 2, "what says that it serves sees every node that was started"
    with Load(url, model, clients=CLIENTS) as load:
        for _ in range(KILLS):
            (pid,) = until_true(lambda: controllers(processes), "a controller", BACK_S)
            os.kill(pid, signal.SIGKILL)
            done = load.finished
            until_true(lambda pid=pid: controllers(processes) - {pid}, "the next controller", BACK_S)
            until_true(lambda done=done: load.finished > done + CLIENTS, "requests finished", BACK_S)
        (pid,) = controllers(processes)
        os.kill(pid, signal.SIGSTOP)
        resume = threading.Timer(STOP_S, os.kill, (pid, signal.SIGCONT))
        resume.start()
        done = load.finished
        until_true(lambda: load.finished > done, "requests finished while it stood still", BACK_S)
        resume.join()
    assert epochs(url) == before, "no node was lost"


def served_url(command: subprocess.Popen[str]) -> str:
    """Waits until the command says how to stop it, which means that it serves, and returns the URL."""
    assert command.stdout is not None
    said = ""
    for line in command.stdout:
        said += line
        if line.startswith("stop: "):
            break
    url: str = re.findall(r"^API: +(http://\S+)/v1$", said, re.MULTILINE)[0]
    return url


def test_under_a_command_with_a_ray_of_its_own(serve: Any) -> None:
    command: Serve = serve("--prefill", "1", "--decode", "1")
    url = command.until(r"^API: +(http://\S+)/v1$", START_S)[1]
    command.until(r"^stop: ", 10)
    kill_again_and_again(url, "SmolLM2-135M-Instruct", command.processes)
    assert command.process.poll() is None
    command.process.send_signal(signal.SIGINT)
    command.until(r"everything was finished", 60)
    assert command.ended() == 0


@pytest.fixture(scope="module")
def ray_nodes(smollm2_path: Path) -> Iterator[RayNodes]:
    nodes = RayNodes(prefill=2, decode=2)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def tandem(ray_nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Tandem:
    return Tandem(ray_nodes.address, tmp_path_factory.mktemp("operator"))


IMPATIENT = ("--set", "timeouts.unresponsive_s=4")
SETTINGS = ("--model", MODEL, "--kv-memory", "256MiB", "--set", "router.local_prefill=never")


def test_under_a_command_on_a_cluster_that_another_one_ends(tandem: Tandem, ray_nodes: RayNodes) -> None:
    with tandem.begun("serve", "--port", str(free_port()), *SETTINGS) as command:
        url = served_url(command)
        kill_again_and_again(url, "SmolLM2-135M-Instruct", lambda: ray_nodes.processes("ray::"))
        assert command.poll() is None
        assert "everything was finished" in tandem("down")
        rest, _ = command.communicate(timeout=BACK_S)
        assert "it was ended: `tandem down`" in rest
        assert "answers again after" in rest
        assert command.returncode == 0
    until_true(lambda: not actors(ray_nodes), "nothing left", BACK_S)


def test_a_command_makes_the_controller_again_that_ray_does_not(tandem: Tandem, ray_nodes: RayNodes) -> None:
    """An operator killed it through Ray, so that Ray never starts it again: the command that started it makes another one."""
    with tandem.begun("serve", "--port", str(free_port()), *SETTINGS) as command:
        url = served_url(command)
        before = epochs(url)
        with Load(url, "SmolLM2-135M-Instruct", clients=CLIENTS) as load:
            (old,) = controllers(lambda: ray_nodes.processes("ray::"))
            tandem.python(
                "import ray; ray.init(address='auto', namespace='tandem', log_to_driver=False); "
                "ray.kill(ray.get_actor('controller'), no_restart=True)"
            )
            until_true(lambda: controllers(lambda: ray_nodes.processes("ray::")) - {old}, "another controller", BACK_S)
            done = load.finished
            until_true(lambda: load.finished > done + CLIENTS, "requests finished", BACK_S)
        assert epochs(url) == before, "no node was lost"
        assert command.poll() is None
        until_true(lambda: "took over 2 nodes" in tandem("status"), "the next controller took over", BACK_S)
        assert "everything was finished" in tandem("down")
        command.communicate(timeout=BACK_S)
        assert command.returncode == 0
    until_true(lambda: not actors(ray_nodes), "nothing left", BACK_S)


def test_detached(tandem: Tandem, ray_nodes: RayNodes) -> None:
    said = tandem("serve", "--detach", "--port", str(free_port()), *SETTINGS, *IMPATIENT, timeout_s=START_S)
    tandem.url = re.findall(r"^API: +(http://\S+)/v1$", said, re.MULTILINE)[0]
    kill_again_and_again(tandem.url, "SmolLM2-135M-Instruct", lambda: ray_nodes.processes("ray::"))
    assert "took over 2 nodes" in tandem("status")


# Each of these keeps every thread or place of the process busy that would answer calls. Its tokens do not pass there.
DEAF_S = 12.0
DEAF = {"decode": f"node.progress_after.remote(10**9, {DEAF_S})", "router": f"node.hold.remote({DEAF_S})"}


@pytest.mark.parametrize("kind", sorted(DEAF))
def test_what_serves_and_answers_no_call_is_left_as_it_is(tandem: Tandem, kind: str) -> None:
    """For three times as long as the controller bears with silence. (Follows the test before.)"""
    before = epochs(tandem.url)
    with Load(tandem.url, "SmolLM2-135M-Instruct", clients=CLIENTS) as load:
        tandem.python(
            "import ray; ray.init(address='auto', namespace='tandem', log_to_driver=False)\n"
            f"(name,) = (each for each in ray.util.list_named_actors() if each.startswith({kind!r}))\n"
            "node = ray.get_actor(name)\n"
            f"held = [{DEAF[kind]} for _ in range(1100 if {kind!r} == 'router' else 16)]\n"
            f"ray.wait(held, num_returns=len(held), timeout={DEAF_S})"
        )
        done = load.finished
        until_true(lambda: load.finished > done, "requests finished", BACK_S)
    assert epochs(tandem.url) == before, "no node was lost"
    said = tandem("status")
    assert "restart" not in said, said


def test_a_controller_that_is_gone_for_good_ends_nothing_and_the_next_command_takes_over(
    tandem: Tandem, ray_nodes: RayNodes
) -> None:
    """An operator killed it through Ray, so that Ray never starts it again. (Follows the test before.)"""
    before = epochs(tandem.url)
    tandem.python(
        "import ray; ray.init(address='auto', namespace='tandem', log_to_driver=False); "
        "ray.kill(ray.get_actor('controller'), no_restart=True)"
    )
    until_true(lambda: not ray_nodes.processes(CONTROLLER), "the controller gone", BACK_S)
    assert "does not run on this Ray cluster" in tandem("status", status=1)
    assert "without a controller" in tandem("serve", "--port", "1", *SETTINGS, status=1)
    port = tandem.url.rpartition(":")[2]
    again = tandem("serve", "--detach", "--port", port, *SETTINGS, *IMPATIENT, timeout_s=START_S)
    assert "ready after" in again
    assert epochs(tandem.url) == before
    tandem.python(
        "import ray; ray.init(address='auto', namespace='tandem', log_to_driver=False); "
        "ray.kill(ray.get_actor('controller'), no_restart=True)"
    )
    until_true(lambda: not ray_nodes.processes(CONTROLLER), "the controller gone", BACK_S)
    assert "it had no controller any more" in tandem("down", status=1)
    until_true(lambda: not actors(ray_nodes), "nothing left", BACK_S)


def actors(ray_nodes: RayNodes) -> list[str]:
    kinds = ("Controller", "Router", "Prefill", "Decode")
    return [name for kind in kinds for name in ray_nodes.processes(f"ray::{kind}Actor").values()]
