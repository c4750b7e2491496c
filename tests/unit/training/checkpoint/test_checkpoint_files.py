"""Checkpoint folders: whole or absent whenever the writer is killed, and clear where damaged."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from swerl.core.errors import TrainerError
from swerl.training.checkpoint import files
from swerl.training.checkpoint import folder as folders
from swerl.training.checkpoint.files import Cut, Piece, pieces
from swerl.training.checkpoint.folder import CheckpointMeta, check_files, mark, read_meta, steps
from swerl.training.checkpoint.folder import write_meta as put_meta

WHOLE = {"a": torch.arange(24.0).view(4, 6), "b": torch.randn(3, 2, 8), "c": torch.randn(5)}


def _ranks(whole: dict[str, torch.Tensor]) -> Iterator[list[Piece]]:
    """Share tensors over two ranks, each of which holds a range of half of every tensor."""
    for rank in range(2):
        found: list[Piece] = []
        for key, tensor in whole.items():
            middle = tensor.numel() // 2 + 1
            flat = tensor.reshape(-1)
            part = flat[:middle] if rank == 0 else flat[middle:]
            found += pieces(key, part, tensor.shape, [], start=rank * middle)
        yield found


def _write(parent: Path, step: int, whole: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint as two ranks do, in the order that a save has."""
    folder = folders.folder_of(parent, step)
    folders.make_room(folder, 0)
    part = folders.part_of(folder)
    written = [files.write(held, part, rank) for rank, held in enumerate(_ranks(whole))]
    files.finish(written, {"step": step}, part)
    marks = {name: found for each in written for name, found in each.files.items()}
    marks |= {name: mark(part / name) for name in files.DESCRIPTIONS}
    put_meta(part, CheckpointMeta(step, "tiny", "qwen3", 1, {"ranks": 2}, "float32", {}, marks))
    files.sync_folder(part)
    folders.put_in_place(folder)
    folders.prune(parent, step, spare=())
    return folder


def _read(folder: Path) -> dict[str, torch.Tensor]:
    check_files(folder, read_meta(folder))
    source = files.CheckpointReader(folder)
    return {key: source.tensor(key) for key in source.shapes}


def test_pieces_of_all_ranks_make_up_the_whole_tensor() -> None:
    rng = random.Random(0)
    for _ in range(150):
        dims = range(rng.randint(0, 3))
        ranks = [rng.choice([1, 2, 3]) for _ in dims]
        stacked = [rng.choice([1, 2]) for _ in dims]
        shape = [a * b * rng.randint(1, 4) for a, b in zip(ranks, stacked, strict=True)]
        whole = torch.rand(shape) + 1
        found = torch.zeros(shape)
        for held in itertools.product(*(range(n) for n in ranks)):
            cuts = [Cut(d, held[d], ranks[d], stacked[d]) for d in dims]
            local = whole
            for cut in cuts:
                parts = local.chunk(cut.num_stacked, cut.dim)
                own = [part.chunk(cut.num_ranks, cut.dim)[cut.rank] for part in parts]
                local = torch.cat(own, cut.dim)
            flat = local.reshape(-1)
            ends = sorted(rng.choices(range(flat.numel() + 1), k=3))
            for start, end in itertools.pairwise([0, *ends, flat.numel()]):
                for piece in pieces("x", flat[start:end], local.shape, cuts, start=start):
                    assert piece.shape == tuple(shape)
                    box = found[tuple(map(slice, piece.offsets, _ends(piece)))]
                    assert not box.any(), "an element belongs to one piece"
                    box.copy_(piece.data)
        assert torch.equal(found, whole)


def _ends(piece: Piece) -> list[int]:
    return [at + size for at, size in zip(piece.offsets, piece.data.shape, strict=True)]


def test_megatron_core_reads_the_folder(tmp_path: Path) -> None:
    folder = _write(tmp_path, 1, WHOLE)
    assert dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    listed = TorchDistLoadShardedStrategy().load_tensors_metadata(folder)
    assert {key: tuple(entry.global_shape) for key, entry in listed.items()} == {
        key: tuple(tensor.shape) for key, tensor in WHOLE.items()
    }


def test_a_writer_killed_at_any_moment_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    versions = [{key: value + n for key, value in WHOLE.items()} for n in range(40)]
    began = time.perf_counter()
    _write(tmp_path, 0, versions[0])
    duration_s = time.perf_counter() - began
    rng = random.Random(1)
    num_whole = 0
    for step in range(1, 40):
        child = os.fork()
        if child == 0:  # only writes and ends; nothing of pytest runs in it
            try:
                _write(tmp_path, step, versions[step])
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0, 1.2 * duration_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        there = steps(tmp_path)
        assert there and there[-1] <= step
        num_whole += there[-1] == step
        for found in there:
            content = _read(folders.folder_of(tmp_path, found))
            assert all(torch.equal(content[key], versions[found][key]) for key in WHOLE)
    assert num_whole < 39, "some writers were killed before their end"
    _write(tmp_path, 41, WHOLE)
    assert {path.name for path in tmp_path.iterdir()} == {f"{n:05d}" for n in steps(tmp_path)}


def test_damage_is_named(tmp_path: Path) -> None:
    folder = _write(tmp_path, 3, WHOLE)
    shard = folder / "__1_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    with pytest.raises(TrainerError, match=rf"{shard.name} has .* bytes of {len(data):,}") as error:
        _read(folder)
    assert "swerl train rewind" in error.value.hint
    flipped = bytearray(data)
    flipped[len(data) // 3] ^= 4
    shard.write_bytes(flipped)
    with pytest.raises(TrainerError, match=f"content of its file {shard.name} has changed"):
        _read(folder)
    shard.unlink()
    with pytest.raises(TrainerError, match=f"its file {shard.name} is missing"):
        _read(folder)
    shard.write_bytes(data)
    (folder / ".metadata").write_bytes(b"\x80\x04nothing")
    with pytest.raises(TrainerError, match="cannot restore"):
        files.CheckpointReader(folder)


def test_another_model_or_format_is_named(tmp_path: Path) -> None:
    folder = _write(tmp_path, 3, WHOLE)
    source = files.CheckpointReader(folder)
    wider = Piece("a", (4, 7), (0, 0), torch.empty(4, 7))
    with pytest.raises(TrainerError, match=r"model has a \(4, 7\), .* shape \(4, 6\)"):
        source.check([wider])
    with pytest.raises(TrainerError, match=r"model has d \(2,\), .* no such tensor"):
        source.check([Piece("d", (2,), (0,), torch.empty(2))])
    meta = folder / "meta.json"
    value = json.loads(meta.read_text())
    meta.write_text(json.dumps({**value, "format": 99}))
    with pytest.raises(TrainerError, match="has format 99; this swerl reads 1"):
        read_meta(folder)
    meta.write_text("{")
    with pytest.raises(TrainerError, match=r"damaged meta\.json"):
        read_meta(folder)
    meta.unlink()
    with pytest.raises(TrainerError, match="half-written, or of an older swerl"):
        read_meta(folder)
    with pytest.raises(TrainerError, match=r"no checkpoint .*; steps that are there: none"):
        read_meta(tmp_path / "00009")


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 9):
        folder = folders.folder_of(tmp_path, step)
        folder.mkdir()
        (folder / "meta.json").write_text("{}")
    folders.prune(tmp_path, 7, spare=(1,))
    # The eighth is of a run that stepped back from it: it is written over, not taken away.
    assert steps(tmp_path) == [1, 6, 7, 8]


def test_a_disk_that_is_too_small_is_said_before_and_filled_one_clearly(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"needs 1048576\.00 GiB") as error:
        folders.make_room(tmp_path / "00001", 2**50)
    assert "resumes" in error.value.hint
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        _write(disk, 1, WHOLE)
        with pytest.raises((OSError, RuntimeError)):
            _write(disk, 2, {"a": torch.ones(200, 1000)})
        assert steps(disk) == [1]
        content = _read(folders.folder_of(disk, 1))
        assert all(torch.equal(content[key], WHOLE[key]) for key in WHOLE)
        _write(disk, 2, WHOLE)
        assert steps(disk) == [1, 2]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
