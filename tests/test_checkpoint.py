"""Checkpoints on disk: whole or absent, and any damage noticed."""

import json
import os
import shutil
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from spot_jax import checkpoint
from spot_jax.checkpoint import CheckpointError

TREE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "nested": {"b": np.arange(3).astype(ml_dtypes.bfloat16), "n": np.array([1, 2], np.int32)},
}


@pytest.fixture
def saved(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    checkpoint.write_checkpoint(
        out, TREE, {"note": 1}, kind="target", files=[tmp_path / "tokenizer.json"]
    )
    return out


def read(path, **options):
    return checkpoint.read_checkpoint(path, kind="target", **options)


def test_round_trip(saved):
    tree, metadata = read(saved)
    assert metadata["note"] == 1
    np.testing.assert_array_equal(tree["a"], TREE["a"])
    assert tree["nested"]["b"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        np.asarray(tree["nested"]["b"]).view(np.uint16), TREE["nested"]["b"].view(np.uint16)
    )
    assert (saved / "tokenizer.json").read_text() == "{}"
    assert sorted(p.name for p in saved.parent.iterdir()) == ["out", "tokenizer.json"]


def test_dtype_is_cast_for_floating_arrays_only(saved):
    tree, _ = read(saved, dtype="bfloat16")
    assert (tree["a"].dtype, tree["nested"]["n"].dtype) == (ml_dtypes.bfloat16, np.int32)


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.write_checkpoint("a/b", TREE, {}, kind="target")
    np.testing.assert_array_equal(read("a/b")[0]["a"], TREE["a"])


def test_digests_are_those_of_sha256sum(saved):
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("no sha256sum here")
    done = subprocess.run([tool, "--quiet", "-c", "SHA256SUMS"], cwd=saved, check=False)
    assert done.returncode == 0


def files_of(directory):
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def test_a_flipped_bit_in_any_file_is_noticed(saved):
    names = [name for name in files_of(saved) if (saved / name).stat().st_size]
    assert len(names) > 5
    for name in names:
        before = (saved / name).read_bytes()
        middle = len(before) // 2
        flipped = bytes([before[middle] ^ 1])
        (saved / name).write_bytes(before[:middle] + flipped + before[middle + 1 :])
        with pytest.raises(CheckpointError) as error:
            read(saved)
        if name != "SHA256SUMS":
            assert f"{name} is damaged" in str(error.value)
        (saved / name).write_bytes(before)
    read(saved)


def test_an_absent_file_is_noticed(saved):
    for name in files_of(saved):
        before = (saved / name).read_bytes()
        (saved / name).unlink()
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            read(saved)
        (saved / name).write_bytes(before)


def test_forgotten_and_malformed_digests_are_noticed(saved):
    path = saved / "SHA256SUMS"
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "params" not in line]
    path.write_text("".join(kept))
    with pytest.raises(CheckpointError, match="params/.* is not listed in SHA256SUMS"):
        read(saved)
    path.write_text("".join(lines) + "rubbish\n")
    with pytest.raises(CheckpointError, match="malformed line 'rubbish'"):
        read(saved)


def resign(directory):
    """Makes the digest of an edited spot_jax.json right again."""
    path = directory / "SHA256SUMS"
    digest = checkpoint._digest(directory / "spot_jax.json")
    lines = [line for line in path.read_text().splitlines() if "spot_jax.json" not in line]
    path.write_text("\n".join([*lines, f"{digest}  spot_jax.json", ""]))


def test_other_versions_and_kinds_are_refused(saved):
    with pytest.raises(CheckpointError, match="holds a target, expected a drafter"):
        checkpoint.read_checkpoint(saved, kind="drafter")
    metadata = json.loads((saved / "spot_jax.json").read_text())
    (saved / "spot_jax.json").write_text(json.dumps(metadata | {"format_version": 2}))
    resign(saved)
    with pytest.raises(CheckpointError, match="format version 2 is not the supported version 1"):
        read(saved)


def test_arrays_that_metadata_misdescribes_are_one_line(saved):
    metadata = json.loads((saved / "spot_jax.json").read_text())
    metadata["arrays"]["c"] = ["float32", [1]]
    (saved / "spot_jax.json").write_text(json.dumps(metadata))
    resign(saved)
    with pytest.raises(CheckpointError, match="params: ") as error:
        read(saved)
    assert len(str(error.value).splitlines()) == 1


def test_what_is_no_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="has no spot_jax.json"):
            read(path)


def test_existing_output(saved, tmp_path):
    with pytest.raises(CheckpointError, match="already exists: pass --overwrite"):
        checkpoint.write_checkpoint(saved, TREE, {}, kind="target")
    checkpoint.write_checkpoint(saved, {"x": TREE["a"]}, {}, kind="target", overwrite=True)
    assert read(saved)[0].keys() == {"x"}
    assert not (saved / "tokenizer.json").exists()
    (tmp_path / "empty").mkdir()
    checkpoint.write_checkpoint(tmp_path / "empty", TREE, {}, kind="target", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="refusing to overwrite"):
        checkpoint.write_checkpoint(tmp_path / "mine", TREE, {}, kind="target", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "mine", "out", "tokenizer.json"]


def test_a_failed_write_leaves_nothing_and_keeps_the_old(saved, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint.shutil, "copyfile", fail)
    absent = tmp_path / "tokenizer.json"
    for out in (tmp_path / "new", saved):
        with pytest.raises(CheckpointError, match="cannot write .*: no space left"):
            checkpoint.write_checkpoint(
                out, TREE, {}, kind="target", files=[absent], overwrite=True
            )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tokenizer.json"]
    assert read(saved)[0].keys() == TREE.keys()


def test_a_failed_swap_restores_the_old(saved, monkeypatch):
    rename, failed = os.rename, []

    def fail_once_moving_in(source, target):
        if target == saved and not failed:
            failed.append(source)
            raise OSError("disk on fire")
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "rename", fail_once_moving_in)
    with pytest.raises(CheckpointError, match="disk on fire"):
        checkpoint.write_checkpoint(saved, {"x": TREE["a"]}, {}, kind="target", overwrite=True)
    monkeypatch.undo()
    assert failed and [p.name for p in saved.parent.iterdir() if p.name.startswith(".")] == []
    assert read(saved)[0].keys() == TREE.keys()


@pytest.mark.parametrize(
    "moment", ["checkpoint._files_under", "pathlib.Path.write_bytes", "checkpoint._move_into_place"]
)
def test_a_killed_run_leaves_nothing_that_loads(tmp_path, moment):
    """SIGKILL once the arrays are written, before the metadata, and before the final rename."""
    code = f"""
import os, pathlib, signal, sys
import numpy as np
from spot_jax import checkpoint

{moment} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.write_checkpoint(sys.argv[1], {{"a": np.zeros(3)}}, {{}}, kind="target")
"""
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", code, str(out)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.") and left.name.endswith(".tmp")
    assert checkpoint.is_checkpoint(left) == ("move" in moment)
    checkpoint.write_checkpoint(out, TREE, {}, kind="target")
    read(out)
