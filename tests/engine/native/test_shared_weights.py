"""Weights are packed once for a machine, and every node gets the same bits from the file."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.native import shared
from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.engine.model.native.shared import Shelf
from tests.engine.model import tiny
from tests.engine.model.driver import load
from tests.engine.model.test_loading import greedy
from tests.engine.native.batches import Sequences
from tests.engine.native.test_native_model import Unit, build, native, tokens, windows


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "qwen3"])
def test_a_model_of_a_file_gives_the_same_bits(unit: Unit, name: str, tmp_path: Path) -> None:
    dtype, instruction_set = unit
    model = build(name).to(dtype)
    forward, sequences = native(model, instruction_set)

    def logits(of: NativeLlamaForward, rows: Sequences) -> torch.Tensor:
        return torch.cat([of(rows.batch({0: ids})).clone() for ids in (tokens(40), tokens(1, seed=1))])

    expected = logits(forward, sequences)
    with (tmp_path / "weights").open("xb") as written:
        forward.write_file(written.fileno())
    with (tmp_path / "weights").open("rb") as file:
        other = NativeLlamaForward(model.config, None, dtype=dtype, threads=2, instruction_set=instruction_set)
        other.use_file(file.fileno())
    assert torch.equal(logits(other, Sequences(other, model, windows(model.config), count=3)), expected)
    assert other.weight_bytes == forward.weight_bytes


@pytest.mark.parametrize("kept", [0, 1, 0.5])
def test_a_file_that_is_not_whole_is_refused(kept: float, tmp_path: Path) -> None:
    model = build("llama")
    forward, _ = native(model)
    path = tmp_path / "weights"
    with path.open("xb") as written:
        forward.write_file(written.fileno())
    os.truncate(path, int(path.stat().st_size * kept) if kept < 1 else path.stat().st_size - 1)
    other = NativeLlamaForward(model.config, None, dtype=torch.float32, threads=1)
    with path.open("rb") as file, pytest.raises(InternalError, match="file of weights"):
        other.use_file(file.fileno())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packed weights are kept, however small."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared, "WORTH_BYTES", 0)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of which models were packed."""
    done: list[Path] = []
    from_checkpoint = NativeLlamaForward.from_checkpoint

    def counted(folder: Path, *args: object, **options: object) -> NativeLlamaForward:
        done.append(folder)
        return from_checkpoint(folder, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeLlamaForward, "from_checkpoint", counted)
    return done


def test_a_second_node_packs_nothing(folder: Path, packed: list[Path], tmp_path: Path) -> None:
    path = tiny.save("llama", tmp_path)
    first, second = load(path), load(path)
    assert packed == [path]
    assert greedy(first) == greedy(second)
    assert [runner.info.shares_weights for runner in (first, second)] == [True, True]
    assert first.info.weight_bytes == next(folder.iterdir()).stat().st_size


def test_a_file_that_cannot_be_read_is_made_again(
    folder: Path, packed: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny.save("llama", tmp_path)
    expected = greedy(load(path))
    (kept,) = folder.iterdir()
    os.truncate(kept, 100)
    again = load(path)
    assert greedy(again) == expected
    assert again.info.shares_weights
    assert "are packed again: native model: this is no file of weights" in caplog.text
    assert len(packed) == 2


def test_nodes_that_start_together_pack_once(folder: Path, packed: list[Path], tmp_path: Path) -> None:
    path, runners = tiny.save("llama", tmp_path), []
    threads = [threading.Thread(target=lambda: runners.append(load(path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(runners) == 3
    assert packed == [path]
    assert all(runner.info.shares_weights for runner in runners)


def test_a_file_that_was_just_named_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who packed it still has it for itself, for a moment."""
    (tmp_path / "model").touch()
    packer = (tmp_path / "model").open()
    fcntl.flock(packer, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda _: packer.close())
    found = Shelf(tmp_path, lambda what, share: None).find("model")
    assert found is not None
    os.close(found)


def test_a_file_that_is_named_while_another_node_asks_for_its_turn_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def named_before(path: Path, *how: int) -> int:
        os.close(opened(tmp_path / "model", os.O_CREAT))
        return opened(path, *how)

    monkeypatch.setattr(os, "open", named_before)
    with Shelf(tmp_path, lambda what, share: None).turn("model") as new:
        assert new is None
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_dtype_another_model_and_other_code_are_packed_apart(
    folder: Path, packed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save("llama", tmp_path)
    load(path)
    load(path, dtype="bfloat16")
    load(tiny.save("qwen3", tmp_path))
    monkeypatch.setattr(shared, "_CODE", tmp_path)
    load(path)
    assert len(packed) == len(list(folder.iterdir())) == 4


def no_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=1 << 30))


def no_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_forward: NativeLlamaForward, file: int) -> None:
        os.write(file, b"half of it")
        raise InternalError("the file cannot be written: No space left on device")

    monkeypatch.setattr(NativeLlamaForward, "write_file", write)


def no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")


@pytest.mark.parametrize("spoil", [no_space, no_writing, no_folder])
def test_without_room_a_node_has_its_own(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tiny.save("llama", tmp_path)
    expected = greedy(load(path))
    shutil.rmtree(folder.parent)
    spoil(folder, monkeypatch)
    runner = load(path)
    assert not runner.info.shares_weights
    assert greedy(runner) == expected
    assert "this node has its packed weights for itself" in caplog.text
    assert folder.is_file() or not list(folder.iterdir())


def shelf_of(folder: Path) -> Shelf:
    return Shelf(folder, lambda _what, _share: None)


def make(shelf: Shelf, name: str, content: bytes = b"whole") -> int:
    with shelf.turn(name) as new:
        assert new is not None
        file = shelf.keep(name, new, len(content), lambda file: os.truncate(file, os.write(file, content)))
    assert file is not None
    return file


def test_a_process_that_died_while_it_wrote_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "model-a.partial").write_bytes(b"more than is written now, and torn")
    shelf = shelf_of(tmp_path)
    assert shelf.find("model-a") is None
    os.close(make(shelf, "model-a"))
    assert (tmp_path / "model-a").read_bytes() == b"whole"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_old_goes_and_what_is_used_stays(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    used = make(shelf, "old-used")
    for name in ("old-unused", "model-before", "model-today", "other-model"):
        os.close(make(shelf, name))
    for name, ago_s in (
        ("old-used", 2 * shared.KEPT_S),
        ("old-unused", 2 * shared.KEPT_S),
        ("model-before", 2 * shared.REPLACED_S),
        ("other-model", 2 * shared.REPLACED_S),
    ):
        os.utime(tmp_path / name, times=(time.time() - ago_s,) * 2)
    os.close(make(shelf, "model-now"))
    assert {path.name for path in tmp_path.iterdir()} == {"old-used", "model-today", "other-model", "model-now"}
    os.close(used)


def test_a_full_disk_loses_what_was_unused_for_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = shelf_of(tmp_path)
    for ago_s, name in enumerate(("c", "b", "a")):
        os.close(make(shelf, name))
        os.utime(tmp_path / name, times=(time.time() - 100 * (ago_s + 1),) * 2)

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(total=100 << 30, free=(8 - 2 * len(list(tmp_path.glob("?")))) << 30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    os.close(make(shelf, "d"))
    assert {path.name for path in tmp_path.iterdir()} == {"c", "d"}
