"""A server that this process starts, as `tandem serve` does, and ends."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.base.own_thread import when_parent_ends

START_S = 1800.0  # a model may have to be fetched
STOP_S = 60.0


class OwnServer:
    """Answers when its constructor returns. `close` ends it, and so does the end of this process, whatever that was."""

    def __init__(self, model: str, flags: Sequence[str] = (), start_s: float = START_S) -> None:
        """`flags`: those of `tandem serve`. Raises ConfigurationError for what it refuses, and Unavailable when it does not
        answer within `start_s`."""
        # A file, because nothing reads while the server runs.
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        command = [sys.executable, "-P", "-m", __name__, "serve", model, "--port", "0", *flags, "-o", "json"]
        # In a group of its own: Ctrl-C is this program's, which may still have requests there.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True
        )
        atexit.register(self.close)
        try:
            self.url = self._until_ready(start_s)
        except BaseException:
            self.close()
            raise

    def _until_ready(self, start_s: float) -> str:
        out = self._process.stdout
        assert out is not None
        ends, text = time.monotonic() + start_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while (left := ends - time.monotonic()) > 0:
                if not selector.select(left):
                    break
                data = os.read(out.fileno(), 65536)
                text += data
                with contextlib.suppress(ValueError, LookupError):  # not whole yet, or the reason why it ends
                    return str(json.loads(text)["url"])
                if not data:
                    raise self._refused()
        raise Unavailable(f"the server did not answer within {start_s:g} s: {self._last_lines()}")

    def _refused(self) -> ConfigurationError:
        return ConfigurationError(f"the server did not start: {self._last_lines()}")

    def _last_lines(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        # A flag that is refused comes after all those that there are.
        at = max((index for index, line in enumerate(lines) if ": error: " in line), default=-15)
        return "\n".join(lines[at:])

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the server, and what it runs. Idempotent."""
        atexit.unregister(self.close)
        process = self._process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S / 2)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # the second asks it to end at once
                try:
                    process.wait(STOP_S / 2)
                except subprocess.TimeoutExpired:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for stream in (process.stdin, process.stdout, self._said):
            if stream is not None:
                stream.close()


def main() -> None:
    """The command, as `python -m tandem.cluster.cli` runs it, in a process that ends with its program."""
    when_parent_ends(_end)
    runpy.run_module("tandem.cluster.cli", run_name="__main__", alter_sys=True)


def _end() -> None:
    """As Ctrl-C does. What is still there after a while is killed."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        os.kill(os.getpid(), number)
        time.sleep(STOP_S / 2)


if __name__ == "__main__":
    main()
