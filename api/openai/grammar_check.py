"""Checks grammars in a process of its own, which ends where one costs too much: no thread can be told to.

The library bounds what a step costs, but not all of the work before the first: a schema of 10 kB, with 320 `patternProperties`, takes
seconds, and one of 30 kB hours.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
from typing import IO

from llguidance import LLMatcher

from tandem.base.errors import Unavailable
from tandem.base.own_thread import in_deep_stack

CPU_S = 3  # of one check; the system counts whole seconds, so it may be one more
TOO_COSTLY = "costs too much to check: leave some of it out, such as patternProperties and long repetitions"
_WALL_S = 60.0  # of one check, on a machine that has no time for it
_END_S = 5.0
_SIZE = struct.Struct("<I")
_BY_ITS_OWN = (-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT)  # how a check ends the process

_SOURCE_LINES = re.compile(r"\n\s+\d+ \|.*", re.DOTALL)
_PLACE = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")


class GrammarChecker:
    """The process, which starts with the first grammar and ends with this one. Only one thread at a time may use it."""

    def __init__(self, cpu_s: int = CPU_S) -> None:
        self._cpu_s = cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def problem(self, grammar: str) -> str:
        """Returns what is wrong with a grammar; "" for one that nodes can compile. Blocks. Raises Unavailable where that was not found
        out."""
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._process = self._started()
        try:
            return self._asked(process, grammar)
        except (OSError, EOFError):
            self.close()
            if process.returncode in _BY_ITS_OWN:
                return TOO_COSTLY
            raise Unavailable("the process that checks grammars has ended: send this again") from None

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tandem.api.openai.grammar_check", str(self._cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is not meant for it
        )

    def _asked(self, process: subprocess.Popen[bytes], grammar: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        # Neither a write nor a read ends by itself while the process does not run.
        late = threading.Timer(_WALL_S, process.kill)
        late.daemon = True
        late.start()
        try:
            _write(process.stdin, grammar)
            found = _read(process.stdout)
        finally:
            late.cancel()
        if found is None:
            raise EOFError
        return found

    def close(self) -> None:
        """Ends the process, which may have ended."""
        process, self._process = self._process, None
        if process is None:
            return
        for file in (process.stdin, process.stdout):
            if file is not None:
                with contextlib.suppress(OSError):  # closing writes what is left, which may fail
                    file.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _write(file: IO[bytes], text: str) -> None:
    data = text.encode()
    file.write(_SIZE.pack(len(data)) + data)
    file.flush()


def _read(file: IO[bytes]) -> str | None:
    """Returns the next text, or None at the end."""
    size = file.read(_SIZE.size)
    if len(size) < _SIZE.size:
        return None
    data = file.read(*_SIZE.unpack(size))
    return data.decode()


# --- the process


def _serve(cpu_s: int) -> None:
    """Answers until its parent closes the pipe or is gone."""
    while (grammar := _read(sys.stdin.buffer)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        _write(sys.stdout.buffer, _problem(grammar))


def _problem(grammar: str) -> str:
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    except BaseException as error:  # a panic of the library is no Exception
        is_error, messages = True, [f"cannot be read: {error}"]
    if not is_error:
        return ""
    plain = _PLACE.sub("", _SOURCE_LINES.sub("", messages[0] if messages else "is no grammar"))
    return _PLACE.sub("", " ".join(plain.split()))[:500]


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    in_deep_stack(lambda: _serve(int(sys.argv[1])))
