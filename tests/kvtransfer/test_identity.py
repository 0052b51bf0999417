"""Whether a process has ended: only what is certain counts."""

from __future__ import annotations

import msgspec

from tandem.kvtransfer.protocol.identity import has_ended, this_process


def test_this_process_has_not_ended() -> None:
    assert not has_ended(this_process())


def test_a_number_that_another_process_has_now_is_of_one_that_has_ended() -> None:
    assert has_ended(msgspec.structs.replace(this_process(), started=1))


def test_a_number_that_no_process_has_is_of_one_that_has_ended() -> None:
    assert has_ended(msgspec.structs.replace(this_process(), pid=2**22 + 1))


def test_nothing_is_known_of_processes_of_other_machines_and_namespaces() -> None:
    for elsewhere in ({"machine": "another"}, {"pid_namespace": 1}):
        assert not has_ended(msgspec.structs.replace(this_process(), pid=2**22 + 1, **elsewhere))  # type: ignore[arg-type]
