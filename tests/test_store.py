"""Run folders: refused when they are not what they seem, and read back to the bit."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import files_in, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.results import load_study
from tl_hysteresis.store import RunFolder, data_file, write_file
from tl_hysteresis.study import resume_study

CONFIG = tiny_config()
TABLE = pd.DataFrame({"seed": [0, 1], "branch": ["below", "above"], "margin": [0.1, -1e-300]})


def tensors() -> dict[str, Tensor]:
    return {"parameters": torch.arange(6.0).view(2, 3), "step": torch.tensor([4, 5])}


def new_run(path: Path) -> RunFolder:
    """A run with a table, a checkpoint and a training state."""
    run = RunFolder.create(path, CONFIG, threads=1)
    run.write_table("loop", TABLE)
    run.write_checkpoint("anchor", tensors())
    run.write_progress("loop", tensors())
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return new_run(tmp_path / "run")


def edit_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps(manifest))


class TestCreate:
    @pytest.mark.parametrize("name", ["run", "deep/down/run"])
    def test_makes_a_folder(self, tmp_path: Path, name: str) -> None:
        run = RunFolder.create(tmp_path / name, CONFIG, threads=3)
        again = RunFolder.open(tmp_path / name)
        assert again.config == CONFIG
        assert again.manifest == run.manifest
        assert again.manifest["threads"] == 3
        assert not again.complete
        assert files_in(run.path).keys() == {"config.json", "manifest.json"}

    def test_takes_an_empty_folder(self, tmp_path: Path) -> None:
        assert RunFolder.create(tmp_path, CONFIG, threads=1).path == tmp_path

    def test_refuses_a_run(self, run: RunFolder) -> None:
        before = files_in(run.path)
        with pytest.raises(HysteresisError, match=rf"^{run.path} holds a run already: .*resume"):
            RunFolder.create(run.path, CONFIG, threads=1)
        assert files_in(run.path) == before

    @pytest.mark.parametrize("name", ["notes.txt", "config.json", ".hidden", "folder/notes.txt"])
    def test_refuses_a_folder_with_other_files(self, tmp_path: Path, name: str) -> None:
        write_file(tmp_path / name, "mine")
        with pytest.raises(HysteresisError, match=f"^{tmp_path} exists and is not an empty folder"):
            RunFolder.create(tmp_path, CONFIG, threads=1)
        assert files_in(tmp_path) == {name: b"mine"}

    def test_refuses_what_another_config_left(self, tmp_path: Path) -> None:
        write_file(tmp_path / "config.json", tiny_config(seeds=[9]).to_json())
        with pytest.raises(HysteresisError, match="is not an empty folder"):
            RunFolder.create(tmp_path, CONFIG, threads=1)

    def test_takes_what_the_same_run_left_when_it_was_killed_at_once(self, tmp_path: Path) -> None:
        write_file(tmp_path / "config.json", CONFIG.to_json())
        write_file(tmp_path / ".manifest.json.tmp", '{"form')
        RunFolder.create(tmp_path, CONFIG, threads=1)
        assert files_in(tmp_path).keys() == {"config.json", "manifest.json"}

    def test_refuses_a_file_in_the_way(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("mine")
        with pytest.raises(HysteresisError, match=f"^{file} exists and is not an empty folder"):
            RunFolder.create(file, CONFIG, threads=1)
        with pytest.raises(HysteresisError, match=f"^cannot make the folder {file / 'run'}: "):
            RunFolder.create(file / "run", CONFIG, threads=1)
        assert files_in(tmp_path) == {"file": b"mine"}


class TestOpen:
    @pytest.mark.parametrize("missing", ["config.json", "manifest.json"])
    def test_refuses_what_is_not_a_run(self, run: RunFolder, missing: str) -> None:
        (run.path / missing).unlink()
        with pytest.raises(HysteresisError, match=f"{run.path} is not a run folder: .*{missing}"):
            RunFolder.open(run.path)

    @pytest.mark.parametrize("where", [".", "nowhere", "file"])
    def test_refuses_other_places(self, tmp_path: Path, where: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(HysteresisError, match="is not a run folder: it has no config.json"):
            RunFolder.open(tmp_path / where)

    def test_refuses_an_edited_config(self, run: RunFolder) -> None:
        path = run.path / "config.json"
        path.write_text(tiny_config(seeds=[0, 2]).to_json())
        with pytest.raises(HysteresisError, match=f"^{path} is not the config that this run began"):
            RunFolder.open(run.path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "not JSON"),
            (CONFIG.to_json()[:-20], "not JSON"),
            ("[]", "settings are a JSON object, not list"),
            ('{"speed": 3}', "bad settings: speed = 3: there is no such setting"),
            (b"\xff\xfe", "utf-8"),
        ],
    )
    def test_refuses_a_damaged_config(
        self, run: RunFolder, text: str | bytes, message: str
    ) -> None:
        path = run.path / "config.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(HysteresisError, match=f"^{path}: .*{message}"):
            RunFolder.open(run.path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"", "is damaged: not JSON"),
            (b'{"format": 1, "conf', "is damaged: not JSON"),
            (b"\xff\xfe", "is damaged: not JSON"),
            (b"[1]", "is damaged: not a JSON object"),
            (b'{"format": 1}', "is damaged: config_hash = None"),
        ],
    )
    def test_refuses_a_damaged_manifest(self, run: RunFolder, text: bytes, message: str) -> None:
        path = run.path / "manifest.json"
        path.write_bytes(text)
        with pytest.raises(HysteresisError, match=f"^{path} {message}"):
            RunFolder.open(run.path)

    @pytest.mark.parametrize("name", ["config_hash", "versions", "threads", "complete", "files"])
    @pytest.mark.parametrize("value", [None, [1]])
    def test_refuses_a_manifest_with_a_bad_entry(
        self, run: RunFolder, name: str, value: object
    ) -> None:
        edit_manifest(run.path, **{name: value})
        with pytest.raises(HysteresisError, match=f"manifest.json is damaged: {name} = "):
            RunFolder.open(run.path)

    @pytest.mark.parametrize("number", [0, 2, "1", None])
    def test_refuses_another_format(self, run: RunFolder, number: object) -> None:
        edit_manifest(run.path, format=number)
        with pytest.raises(HysteresisError, match=f"of format {number}; this version reads format"):
            RunFolder.open(run.path)


class TestVersions:
    @pytest.mark.parametrize("package", ["python", "tl-hysteresis", "torch", "transformer-lens"])
    def test_a_run_is_continued_by_the_versions_that_began_it(
        self, run: RunFolder, package: str
    ) -> None:
        edit_manifest(run.path, versions=run.manifest["versions"] | {package: "0.0.1"})
        before = files_in(run.path)
        with pytest.raises(HysteresisError, match=f"was begun with {package} 0.0.1, here is "):
            resume_study(run.path)
        assert files_in(run.path) == before

    def test_a_finished_run_can_be_read_by_others(self, run: RunFolder) -> None:
        edit_manifest(run.path, versions=run.manifest["versions"] | {"torch": "0.0.1"})
        assert load_study(run.path).table("loop").equals(TABLE)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\n",
    "a bit flipped at the start": lambda data: flipped(data, 0),
    "a bit flipped in the middle": lambda data: flipped(data, len(data) // 2),
    "a bit flipped at the end": lambda data: flipped(data, len(data) - 1),
    "another's tensors": lambda data: save({"parameters": torch.zeros(2, 3)}),
    "another's table": lambda data: b"seed,branch,margin\n0,below,0.5\n",
}


class TestDamage:
    @pytest.mark.parametrize("file", ["tables/loop.csv", "checkpoints/anchor.safetensors"])
    @pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
    def test_of_a_finished_file(
        self, run: RunFolder, file: str, damage: Callable[[bytes], bytes]
    ) -> None:
        path = run.path / file
        path.write_bytes(damage(path.read_bytes()))
        readers: list[Callable[[], object]] = [
            run.verify,
            lambda: load_study(run.path),
            lambda: resume_study(run.path),
            lambda: run.read_table("loop") if "loop" in file else run.read_checkpoint("anchor"),
        ]
        for read in readers:
            with pytest.raises(HysteresisError, match=f"^{path} is damaged, or not this run's"):
                read()

    @pytest.mark.parametrize("file", ["tables/loop.csv", "checkpoints/anchor.safetensors"])
    def test_a_finished_file_that_is_gone(self, run: RunFolder, file: str) -> None:
        (run.path / file).unlink()
        with pytest.raises(HysteresisError, match=f"^cannot read {run.path / file}: No such file"):
            run.verify()

    def test_a_file_that_was_never_finished(self, run: RunFolder) -> None:
        for read in (run.read_table, run.read_checkpoint):
            with pytest.raises(HysteresisError, match=r"has no .*/routes\..* is not complete\)"):
                read("routes")

    def test_a_file_that_the_manifest_does_not_name_counts_for_nothing(
        self, run: RunFolder
    ) -> None:
        (run.path / "tables" / "routes.csv").write_text("seed\n0\n")
        assert not run.has("tables/routes.csv")
        with pytest.raises(HysteresisError, match=r"has no tables/routes.csv"):
            run.read_table("routes")

    @pytest.mark.parametrize("name", [name for name in DAMAGE if "flipped" not in name])
    def test_of_the_training_state(self, run: RunFolder, name: str) -> None:
        path = run.path / "progress.safetensors"
        path.write_bytes(DAMAGE[name](path.read_bytes()))
        with pytest.raises(HysteresisError, match=f"^{path} is damaged: delete it to repeat"):
            run.read_progress("loop")

    def test_no_flipped_bit_gives_another_training_state(self, run: RunFolder) -> None:
        path = run.path / "progress.safetensors"
        data, intact = path.read_bytes(), tensors()
        for at in range(len(data)):
            path.write_bytes(flipped(data, at))
            try:
                state = run.read_progress("loop")
            except HysteresisError:
                continue
            # None: the flip made the label say another stage, and this one starts afresh.
            if state is not None:
                assert state.keys() == intact.keys()
                assert all(torch.equal(state[name], intact[name]) for name in intact)

    def test_the_training_state_of_another_config(self, run: RunFolder, tmp_path: Path) -> None:
        other = RunFolder.create(tmp_path / "other", tiny_config(seeds=[7]), threads=1)
        other.write_progress("loop", tensors())
        path = run.path / "progress.safetensors"
        path.write_bytes((other.path / "progress.safetensors").read_bytes())
        with pytest.raises(HysteresisError, match=f"^{path} belongs to a run of another config"):
            run.read_progress("loop")

    def test_the_training_state_of_another_stage(self, run: RunFolder) -> None:
        assert run.read_progress("relaxation") is None
        (run.path / "progress.safetensors").unlink()
        assert run.read_progress("loop") is None


bits = st.integers(0, 2**64 - 1).map(lambda n: float(np.uint64(n).view(np.float64)))


class TestRoundTrip:
    @given(st.lists(bits | st.floats(width=32) | st.floats(-10, 10), min_size=1, max_size=30))
    @settings(deadline=None, max_examples=50)
    def test_tables_keep_every_bit_of_a_float(
        self, tmp_path_factory: pytest.TempPathFactory, values: list[float]
    ) -> None:
        run = RunFolder.create(tmp_path_factory.mktemp("run"), CONFIG, threads=1)
        table = pd.DataFrame({"seed": range(len(values)), "value": values})
        run.write_table("floats", table)
        again = run.read_table("floats")
        assert list(again.columns) == ["seed", "value"]
        assert again["seed"].dtype == np.int64
        assert again["value"].dtype == np.float64
        written, read = np.array(values), again["value"].to_numpy()
        finite = ~np.isnan(written)
        assert np.array_equal(finite, ~np.isnan(read))
        assert written[finite].tobytes() == read[finite].tobytes()

    @given(st.lists(bits, min_size=1, max_size=20))
    @settings(deadline=None, max_examples=50)
    def test_a_table_that_was_read_is_written_as_the_same_bytes(
        self, tmp_path_factory: pytest.TempPathFactory, values: list[float]
    ) -> None:
        run = RunFolder.create(tmp_path_factory.mktemp("run"), CONFIG, threads=1)
        run.write_table("one", pd.DataFrame({"site": "L0H1", "value": values}))
        run.write_table("two", run.read_table("one"))
        files = files_in(run.path)
        assert files["tables/one.csv"] == files["tables/two.csv"]

    def test_checkpoints_keep_values_shapes_and_dtypes(self, run: RunFolder) -> None:
        values = {
            "floats": torch.tensor([[0.1, -0.0], [torch.nan, torch.inf]]),
            "doubles": torch.tensor(1 / 3, dtype=torch.float64),
            "integers": torch.arange(4).view(2, 2).T,
            "empty": torch.empty(0),
        }
        run.write_checkpoint("all", values)
        again = RunFolder.open(run.path).read_checkpoint("all")
        assert again.keys() == values.keys()
        for name, value in values.items():
            assert again[name].dtype == value.dtype
            assert again[name].shape == value.shape
            assert again[name].numpy().tobytes() == value.contiguous().numpy().tobytes()

    def test_the_manifest_names_what_is_finished(self, run: RunFolder) -> None:
        again = RunFolder.open(run.path)
        assert again.manifest["files"].keys() == {
            "tables/loop.csv",
            "checkpoints/anchor.safetensors",
        }
        again.verify()

    def test_finishing_drops_the_training_state(self, run: RunFolder) -> None:
        run.finish()
        assert RunFolder.open(run.path).complete
        assert "progress.safetensors" not in files_in(run.path)

    def test_seconds_add_up(self, run: RunFolder) -> None:
        run.add_seconds("loop", 1.5)
        run.add_seconds("loop", 2.0)
        run.add_seconds("relaxation", 0.25)
        assert json.loads((run.path / "timings.json").read_text()) == {
            "loop": 3.5,
            "relaxation": 0.25,
        }


def full_disk(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestAtomicity:
    @pytest.mark.parametrize("step", ["fsync", "replace"])
    @pytest.mark.parametrize("error", [full_disk, KeyboardInterrupt])
    def test_a_write_that_fails_leaves_the_file_as_it_was(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch, step: str, error: Any
    ) -> None:
        def fail(*_: object) -> NoReturn:
            error()
            raise error

        before = files_in(run.path)
        monkeypatch.setattr(os, step, fail)
        writes: list[tuple[str, Callable[[], object]]] = [
            ("manifest.json", lambda: run.write_table("loop", 2 * TABLE)),
            ("tables/new.csv", lambda: run.write_table("new", TABLE)),
            ("checkpoints/new.safetensors", lambda: run.write_checkpoint("new", tensors())),
            ("progress.safetensors", lambda: run.write_progress("relaxation", tensors())),
            ("manifest.json", lambda: run.note(accepted_unconverged=True)),
            ("timings.json", lambda: run.add_seconds("loop", 1.0)),
            ("config.json", lambda: write_file(run.path / "config.json", "")),
        ]
        for name, write in writes:
            if error is full_disk:
                message = f"^cannot write {run.path / name}: No space left on device; files written"
                with pytest.raises(HysteresisError, match=message):
                    write()
            else:
                with pytest.raises(KeyboardInterrupt):
                    write()
            assert files_in(run.path) == before

    def test_a_folder_in_the_way(self, run: RunFolder) -> None:
        path = run.path / "tables" / "routes.csv"
        path.mkdir()
        with pytest.raises(HysteresisError, match=f"^cannot write {path}: Is a directory"):
            run.write_table("routes", TABLE)
        assert not list(run.path.rglob("*.tmp"))

    def test_the_temporary_file_is_whole_before_it_gets_its_name(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replace, seen = os.replace, []

        def look(source: Path, target: Path) -> None:
            seen.append((target.name, source.parent == target.parent, source.read_bytes()))
            replace(source, target)

        monkeypatch.setattr(os, "replace", look)
        run.write_table("new", TABLE)
        after = files_in(run.path)
        assert seen == [
            ("new.csv", True, after["tables/new.csv"]),
            ("manifest.json", True, after["manifest.json"]),
        ]

    def test_the_manifest_never_names_a_version_that_is_not_there(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replace = os.replace

        def look(source: Path, target: Path) -> None:
            replace(source, target)
            RunFolder.open(run.path).verify()

        monkeypatch.setattr(os, "replace", look)
        run.write_table("loop", pd.concat([TABLE, TABLE]))
        assert len(RunFolder.open(run.path).read_table("loop")) == 4

    def test_cleaning_removes_temporary_files_and_nothing_else(self, run: RunFolder) -> None:
        before = files_in(run.path)
        for name in (".manifest.json.tmp", "tables/.loop.csv.tmp", "checkpoints/.x.tmp"):
            (run.path / name).write_text("half a fi")
        run.clean()
        assert files_in(run.path) == before


def test_data_file_names_what_is_missing() -> None:
    assert data_file("paper.csv").is_file()
    with pytest.raises(HysteresisError, match="the package's data has no nothing.csv"):
        data_file("nothing.csv")
