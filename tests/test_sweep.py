"""Sweeps: the same numbers on any workers, whatever is killed, and nothing trained on bad input."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import command, files_in, results_in, tiny_config

from tl_hysteresis import workers
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.grid import Grid
from tl_hysteresis.results import load_study
from tl_hysteresis.store import RunFolder
from tl_hysteresis.study import ANCHOR_FILES, run_study
from tl_hysteresis.sweep import Job, SweepResult, load_sweep, refuse_too_few, run_sweep, work

BASE = tiny_config(
    seeds=[0, 1, 2],
    model={"n_layers": 1},
    relaxation={"measure_at": [0, 2]},
    measurement={"circuits": False},
)
GRID = Grid.of(BASE, {"schedule.dwell": [2, 8, 64], "schedule.delta": [0.1, 0.2]})
PATIENCE = 90.0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    """The sweep in this process; not to be changed."""
    return run_sweep(GRID, tmp_path_factory.mktemp("sweep") / "alone", workers=1)


def cells_of(sweep: SweepResult) -> dict[str, dict[str, bytes]]:
    return {cell.name: results_in(sweep.path / "cells" / cell.name) for cell in sweep.grid.cells}


def wait_for(happens: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := happens()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
    return found


def at_work(folder: Path) -> list[Path]:
    return [path for path in folder.glob("unfinished/*") if path.is_dir()]


class Dask:
    """A scheduler and its workers, each a process."""

    def __init__(self, home: Path) -> None:
        self.file, self.processes = home / "scheduler.json", list[subprocess.Popen[bytes]]()
        self.start("dask_scheduler", "--port", "0", "--no-dashboard")
        wait_for(self.file.exists)
        self.address = str(wait_for(lambda: json.loads(self.file.read_text()))["address"])

    def start(self, what: str, *arguments: str) -> "subprocess.Popen[bytes]":
        line = [sys.executable, "-m", f"distributed.cli.{what}", "--scheduler-file", str(self.file)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        # Importable there is what is importable here.
        path = os.pathsep.join(entry or "." for entry in sys.path)
        environment = os.environ | {"PYTHONPATH": path}
        process = subprocess.Popen([*line, *arguments], env=environment, **quiet)  # type: ignore[call-overload]
        self.processes.append(process)
        return process  # type: ignore[no-any-return]

    def worker(self, threads: int = 1) -> "subprocess.Popen[bytes]":
        return self.start("dask_worker", "--nthreads", str(threads), "--no-nanny", "--no-dashboard")

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[Dask]:
    cluster = Dask(tmp_path)
    yield cluster
    cluster.stop()


class TestSameNumbers:
    def test_on_two_processes(self, alone: SweepResult, tmp_path: Path) -> None:
        sweep = run_sweep(GRID, tmp_path / "sweep", workers=2)
        assert sweep.complete
        assert cells_of(sweep) == cells_of(alone)
        assert sweep.gaps().equals(alone.gaps())

    def test_on_a_dask_cluster_of_which_a_worker_is_killed(
        self, alone: SweepResult, tmp_path: Path, dask: Dask
    ) -> None:
        pair = [dask.worker(), dask.worker()]
        found: list[SweepResult] = []
        folder = tmp_path / "sweep"
        thread = threading.Thread(
            target=lambda: found.append(run_sweep(GRID, folder, dask=dask.address))
        )
        thread.start()
        wait_for(lambda: len(at_work(folder)) == 2)  # one cell for each of them
        pair[0].send_signal(signal.SIGKILL)
        assert pair[0].wait() == -signal.SIGKILL
        thread.join(PATIENCE)
        assert found, "the sweep did not end"
        assert pair[1].poll() is None
        assert found[0].complete, found[0].cells()["error"].to_list()
        assert cells_of(found[0]) == cells_of(alone)

    def test_when_the_process_that_runs_it_is_killed(
        self, alone: SweepResult, tmp_path: Path
    ) -> None:
        folder = tmp_path / "sweep"
        (tmp_path / "grid.json").write_text(GRID.to_json())
        program = (
            "import sys; from pathlib import Path; from tl_hysteresis import Grid, run_sweep\n"
            "grid = Grid.from_json(Path(sys.argv[1], 'grid.json').read_text())\n"
            "run_sweep(grid, Path(sys.argv[1], 'sweep'), workers=1)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
        complete = wait_for(lambda: list(folder.glob("cells/*")))[0]
        process.kill()
        process.wait()
        assert not load_sweep(folder).complete
        before = (complete / "manifest.json").stat()
        sweep = run_sweep(GRID, folder, workers=1)
        assert sweep.complete
        assert cells_of(sweep) == cells_of(alone)
        after = (complete / "manifest.json").stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    @pytest.mark.parametrize("n_files", range(len(ANCHOR_FILES) + 1))
    def test_when_a_worker_is_killed_as_it_takes_over_the_anchors(
        self, alone: SweepResult, tmp_path: Path, n_files: int
    ) -> None:
        cell, donor = alone.grid.cells[0], alone.path / "cells" / alone.grid.cells[1].name
        run = RunFolder.create(tmp_path / "unfinished" / cell.name, cell.config, threads=1)
        run.adopt(RunFolder.open(donor), *ANCHOR_FILES[:n_files])
        assert work(Job("cell", tmp_path, 1, cell, donor)) is None
        expected = results_in(alone.path / "cells" / cell.name)
        assert results_in(tmp_path / "cells" / cell.name) == expected

    def test_as_studies_run_alone(self, alone: SweepResult, tmp_path: Path) -> None:
        cell = alone.grid.cells[-1]
        run_study(cell.config, tmp_path / "run")
        for name in ("loop", "relaxation", "anchors", "course"):
            expected = load_study(tmp_path / "run").table(name)
            assert alone.study(cell).table(name).equals(expected)


class TestAnchors:
    def test_are_shared(self, alone: SweepResult) -> None:
        [anchors] = (alone.path / "anchors").iterdir()
        assert {cell.anchor for cell in alone.grid.cells} == {anchors.name}

    def test_of_a_study_are_taken_where_they_fit(self, alone: SweepResult, tmp_path: Path) -> None:
        donor = alone.path / "cells" / alone.grid.cells[0].name
        grid = Grid.of(BASE, {"schedule.dwell": [3], "schedule.p0": [0.5, 0.6]})
        sweep = run_sweep(grid, tmp_path / "sweep", anchors=[donor])
        assert sweep.complete
        other = grid.cells[1].anchor
        assert [path.name for path in (sweep.path / "anchors").iterdir()] == [other]
        expected = load_study(donor).table("anchors")
        assert sweep.study(grid.cells[0]).table("anchors").equals(expected)


class TestFailures:
    def test_do_not_end_the_others_and_are_run_again(self, tmp_path: Path) -> None:
        grid = Grid.of(BASE, {"schedule.dwell": [2, 3]})
        in_the_way = tmp_path / "sweep" / "unfinished" / grid.cells[0].name
        run_sweep(grid, tmp_path / "sweep")
        done = tmp_path / "sweep" / "cells" / grid.cells[0].name
        done.rename(tmp_path / "kept")
        in_the_way.write_text("not a folder")
        sweep = run_sweep(grid, tmp_path / "sweep")
        table = sweep.cells().set_index("schedule.dwell")
        assert table.loc[2, "status"] == "failed"
        assert "exists and is not an empty folder" in str(table.loc[2, "error"])
        assert table.loc[3, "status"] == "complete"
        assert set(sweep.gaps()["schedule.dwell"]) == {3}
        with pytest.raises(HysteresisError, match=r"dwell = 2 of .* is not complete"):
            sweep.study(grid.cells[0])
        in_the_way.unlink()
        again = run_sweep(grid, tmp_path / "sweep")
        assert again.complete
        assert not (again.cells()["error"] != "").any()
        assert results_in(done) == results_in(tmp_path / "kept")

    def test_of_anchors_are_those_of_their_cells(self, tmp_path: Path) -> None:
        grid = Grid.of(
            BASE, {"anchor.require_convergence": [True, False], "schedule.dwell": [1, 2]}
        )
        sweep = run_sweep(grid, tmp_path / "sweep")
        for row in sweep.cells().to_dict("records"):
            if row["anchor.require_convergence"]:
                assert row["status"] == "failed"
                assert "anchors that have not converged" in str(row["error"])
            else:
                assert row["status"] == "complete"

    def test_before_any_cell_is_done_tables_say_so(
        self, alone: SweepResult, tmp_path: Path
    ) -> None:
        (tmp_path / "sweep.json").write_bytes((alone.path / "sweep.json").read_bytes())
        sweep = load_sweep(tmp_path)
        assert set(sweep.cells()["status"]) == {"missing"}
        with pytest.raises(HysteresisError, match="no cell of the sweep .* is complete yet"):
            sweep.gaps()
        with pytest.raises(HysteresisError, match=r"not complete \(6 missing\): run it again"):
            sweep.quasi_static(margin=0.05)


class TestTables:
    def test_are_those_of_the_studies_under_the_axes(self, alone: SweepResult) -> None:
        table = alone.table("relaxation")
        for cell in alone.grid.cells:
            rows = table[table["cell"] == cell.name]
            for name, value in cell.values.items():
                assert (rows[name] == value).all()
            own = load_study(alone.path / "cells" / cell.name).table("relaxation")
            assert rows[list(own)].reset_index(drop=True).equals(own)

    def test_each_combination_of_the_other_axes_is_judged(self, alone: SweepResult) -> None:
        judged = alone.quasi_static(margin=1e6)
        assert [cell.values for cell in judged] == [{"schedule.delta": d} for d in (0.1, 0.2)]
        assert {cell.test.verdict for cell in judged} == {"no memory found"}

    def test_a_second_call_changes_nothing(self, alone: SweepResult) -> None:
        before = files_in(alone.path)
        run_sweep(GRID, alone.path, workers=1)
        assert files_in(alone.path) == before


class TestRefuses:
    @pytest.fixture(autouse=True)
    def nothing_trains(self, tmp_path: Path) -> Iterator[None]:
        yield
        assert not list(tmp_path.rglob("anchors"))
        assert not list(tmp_path.rglob("unfinished"))

    def test_the_folder_of_another_sweep_or_of_something_else(
        self, alone: SweepResult, tmp_path: Path
    ) -> None:
        other = Grid.of(BASE, {"schedule.dwell": [2]})
        before = files_in(alone.path)
        with pytest.raises(HysteresisError, match="holds a sweep of another grid: choose another"):
            run_sweep(other, alone.path)
        assert files_in(alone.path) == before
        (tmp_path / "mine.txt").write_text("mine")
        with pytest.raises(HysteresisError, match="exists and is not an empty folder"):
            run_sweep(other, tmp_path)
        assert files_in(tmp_path) == {"mine.txt": b"mine"}

    def test_a_sweep_that_is_damaged_or_of_other_versions(
        self, alone: SweepResult, tmp_path: Path
    ) -> None:
        text = (alone.path / "sweep.json").read_text()
        (tmp_path / "sweep.json").write_text(text[:-9])
        with pytest.raises(HysteresisError, match="sweep.json is damaged"):
            run_sweep(GRID, tmp_path)
        data = json.loads(text)
        data["versions"]["torch"] = "1.0"
        (tmp_path / "sweep.json").write_text(json.dumps(data))
        with pytest.raises(HysteresisError, match="was begun with torch 1.0, here is"):
            run_sweep(GRID, tmp_path)

    def test_workers_that_cannot_be(self, tmp_path: Path) -> None:
        with pytest.raises(HysteresisError, match="workers = 0 must be at least 1"):
            run_sweep(GRID, tmp_path / "sweep", workers=0)
        with pytest.raises(HysteresisError, match=r"workers = 2 and dask = 'x': choose one"):
            run_sweep(GRID, tmp_path / "sweep", workers=2, dask="x")

    def test_a_task_that_cannot_be_made(self, tmp_path: Path) -> None:
        task = {"name": "custom", "factory": "nowhere:task"}
        grid = Grid.of(tiny_config().model_dump() | {"task": task}, {"schedule.dwell": [1]})
        with pytest.raises(HysteresisError, match="made no task: ModuleNotFoundError"):
            run_sweep(grid, tmp_path / "sweep")

    def test_too_few_seeds_for_the_quasi_static_test(self) -> None:
        grid = Grid.of(BASE, {"schedule.dwell": [2, 8, 64], "seeds": [[0, 1, 2], [0, 1]]})
        with pytest.raises(HysteresisError, match="too few seeds: table has n = 2"):
            refuse_too_few(grid)

    def test_a_silent_scheduler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "PATIENCE", 0.5)
        with pytest.raises(HysteresisError, match="no Dask scheduler answers at tcp://127.0.0.1:1"):
            run_sweep(GRID, tmp_path / "sweep", dask="tcp://127.0.0.1:1")

    def test_workers_of_a_cluster_that_cannot_do_it(
        self, tmp_path: Path, dask: Dask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "sweep"
        with monkeypatch.context() as patch:
            patch.setattr(workers, "PATIENCE", 1.0)
            with pytest.raises(HysteresisError, match="has no worker"):
                run_sweep(GRID, folder, dask=dask.address)
        dask.worker()
        with monkeypatch.context() as patch:
            patch.setattr(workers, "PATIENCE", 60.0)
            patch.setattr(workers, "versions", lambda: {"source": "another"})
            with pytest.raises(HysteresisError, match=r"has source \w+, here is another"):
                run_sweep(GRID, folder, dask=dask.address)
        with monkeypatch.context() as patch:
            patch.setattr(workers, "PROBE", "elsewhere/.probe")
            patch.setattr(Path, "touch", lambda *_: None)
            with pytest.raises(HysteresisError, match="does not see the folder"):
                run_sweep(GRID, folder, dask=dask.address)
        dask.worker(threads=2)
        message = "runs 2 jobs in threads of one process"

        def refused() -> bool:  # once the second worker has arrived
            with pytest.raises(HysteresisError) as caught:
                with monkeypatch.context() as patch:
                    patch.setattr(workers, "versions", lambda: {"source": "another"})
                    run_sweep(GRID, folder, dask=dask.address)
            return message in str(caught.value)

        wait_for(refused)


class TestCommand:
    def test_runs_shows_and_goes_on(self, tmp_path: Path) -> None:
        grid = tmp_path / "grid.toml"
        text = "seeds = [0, 1]\nthreads = 1\n[base.anchor]\nupdates = 4\nevaluate_every = 2\n"
        grid.write_text(
            text.replace("seeds", "[base]\nseeds", 1)
            + "require_convergence = false\n[base.measurement]\ncircuits = false\n"
            "conflict_trials = 16\npatching_trials = 8\n[base.relaxation]\nmeasure_at = [0, 1]\n"
            '[axes]\n"schedule.dwell" = [1, 2]\n"schedule.steps" = [4]\n'
        )
        answer = command("sweep", grid, "--out", tmp_path / "out", "--workers", 1)
        assert answer.code == 0, answer.err
        assert "2 complete" in " ".join(answer.out.split())
        assert command("show", tmp_path / "out").out == answer.out
        again = command("sweep", grid, "--out", tmp_path / "out", "--workers", 1)
        assert again.out == answer.out
        answer = command("verdict", tmp_path / "out")
        assert answer.code == 2
        assert "error: too few seeds" in answer.err

    def test_an_incomplete_sweep_exits_with_1(self, tmp_path: Path) -> None:
        grid = tmp_path / "grid.toml"
        grid.write_text(
            "[base]\nseeds = [0]\n[base.anchor]\nupdates = 2\nevaluate_every = 1\n"
            '[axes]\n"schedule.dwell" = [1]\n'
        )
        answer = command("sweep", grid, "--out", tmp_path / "out", "--workers", 1)
        assert answer.code == 1
        assert "1 failed" in answer.out
        assert "have not converged" in answer.out

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[axes]\n'schedule.dwel' = [1]", "schedule.dwel = 1: there is no such setting"),
            ("[axes]\n'schedule.dwell' = []", "the axis schedule.dwell is empty"),
            (
                "[axes]\n'schedule.delta' = [0.1, 0.7]",
                "the cell schedule.delta = 0.7: bad",
            ),
            ("[axis]", "a grid has no key 'axis'"),
            ("axes", "not TOML"),
        ],
    )
    def test_refuses_a_bad_grid(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "grid.toml").write_text(text)
        answer = command("sweep", tmp_path / "grid.toml", "--out", tmp_path / "out")
        assert (answer.code, answer.out) == (2, "")
        assert message in answer.err
        assert files_in(tmp_path).keys() == {"grid.toml"}
