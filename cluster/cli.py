"""The `tandem` command. A subcommand's imports happen when it runs, so that help and usage errors are instant."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Sequence

from tandem.cluster.commands import changing, completion, looking, serving
from tandem.cluster.commands.output import print_error
from tandem.cluster.commands.parser import CommandsParser, VersionAction
from tandem.cluster.wings import commands_of_wings


def main(arguments: Sequence[str] | None = None) -> int:
    status = _run(sys.argv[1:] if arguments is None else arguments)
    runtime = sys.modules.get("tandem.cluster.on_ray.runtime")
    if runtime is not None and runtime.is_held_by_ray():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    return status


def _run(words: Sequence[str]) -> int:
    failed = 1
    try:
        options = _options(words)
        if options is None:
            return 2
        failed = getattr(options, "failed", failed)
        status = _answered(options, failed)
        if sys.stdout is not None:
            sys.stdout.flush()  # what is left would fail at exit
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # The reader of our output has gone, or its disk is full. Without this, the interpreter would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            print(f"tandem: {error.strerror}", file=sys.stderr)
        return failed
    return status


def _options(words: Sequence[str]) -> argparse.Namespace | None:
    parser = make_parser()
    if not words:
        parser.print_help(sys.stderr)
        return None
    if words[0] == "completion" and words[2:3] == ["--words"]:
        # Not by the parser: what is typed may be what it would take for its own, such as a lone `--`.
        return argparse.Namespace(verbose=False, run=lambda _: _complete(parser, words[3:]))
    return parser.parse_args(words)


def _answered(options: argparse.Namespace, failed: int) -> int:
    from tandem.base.errors import TandemError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character must not end the command
            stream.reconfigure(errors="replace")
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.ERROR,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        status: int = options.run(options)
    except TandemError as error:
        print_error(options, error)
        status = failed
    return status


def make_parser() -> argparse.ArgumentParser:
    own = (*serving.COMMANDS, *looking.COMMANDS, *changing.COMMANDS, completion.COMMAND)
    parser = CommandsParser(
        (*own, *commands_of_wings()),
        prog="tandem",
        description="Serve language models with prefill and decode on separate machines.",
    )
    parser.add_argument("--verbose", action="store_true", help="log everything to the terminal")
    parser.add_argument("--version", action=VersionAction, nargs=0, help="print the versions of all parts")
    return parser


def _complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    print("\n".join(completion.complete(parser, words)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
