"""Sweeps: a study for each cell of a grid, on as many workers as there are, and their tables.

The folder of a sweep holds

- ``sweep.json``: the grid, the versions, and the threads of each worker;
- ``cells/HASH``, the run folder of a complete study, named by the hash of its settings. It is moved
  there in one piece; until then it stands in ``unfinished/HASH``, where a later call takes it up;
- ``anchors/HASH``: anchors, trained once for all cells that share them;
- ``failures/HASH.json``: what went wrong in a cell, until it succeeds.
"""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from filelock import FileLock, Timeout
from tqdm import tqdm

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.grid import Cell, Grid
from tl_hysteresis.quasistatic import QuasiStatic, loop_area, quasi_static
from tl_hysteresis.results import StudyResult, load_study
from tl_hysteresis.store import MANIFEST, RunFolder, versions, write_file
from tl_hysteresis.study import check_possible, resume_study, run_study, threads, train_anchors
from tl_hysteresis.workers import PROBE, Cluster, Local, cluster, describe

FORMAT = 1
SWEEP, LOCK = "sweep.json", ".lock"
RATE = "schedule.dwell"


def run_sweep(
    grid: Grid,
    folder: Path | str,
    *,
    workers: int | None = None,
    dask: str | None = None,
    anchors: Sequence[Path | str] = (),
    progress: bool = False,
) -> SweepResult:
    """Run the study of every cell of a grid; again, those that are missing or failed.

    A cell that fails is reported in `SweepResult.cells` and does not end the others. Each worker
    computes with cores / workers threads, unless the base sets `threads`; a sweep keeps the number
    that it began with, so that its cells repeat to the bit.

    Args:
        grid: the cells.
        folder: where the sweep is kept: new, empty, or begun with the same grid.
        workers: processes on this machine. Unset, what `joblib.parallel_config` says, if anything;
            otherwise one, this process.
        dask: address of a Dask scheduler, to run on its workers instead. They must see the folder
            under the same path.
        anchors: run folders of studies whose anchors may be taken where the settings agree.
        progress: show a progress bar.

    Raises:
        HysteresisError: before anything trains, for a folder of another sweep or of other versions,
            a task, model or device that cannot be made, a scheduler that does not answer, a worker
            that has other versions or does not see the folder.

    Example:
        >>> grid = Grid.of({"seeds": [0, 1, 2]}, {"schedule.dwell": [2, 8, 32, 64]})
        >>> sweep = run_sweep(grid, "runs/dwells", workers=2)  # doctest: +SKIP
        >>> sweep.gaps()  # doctest: +SKIP
    """
    if dask is not None and workers is not None:
        raise HysteresisError(f"workers = {workers} and dask = {dask!r}: choose one of them")
    path = Path(folder).absolute()
    _refuse_another(path, grid)
    donors = _donors(anchors)
    with _connected(workers, dask, path) as team:
        _check_cells(team, grid)
        with _locked(path):
            sweep = _begun(path, grid, team.threads)
            _run(sweep, team, donors, progress)
    return sweep


def _run(
    sweep: SweepResult, team: Local | Cluster, donors: dict[str, Path], progress: bool
) -> None:
    """First the anchors that no study gives, then the cells whose anchors are there."""
    missing = [cell for cell in sweep.grid.cells if not sweep.is_complete(cell)]
    for cell in missing:
        (sweep.path / "failures" / f"{cell.name}.json").unlink(missing_ok=True)
    groups: dict[str, list[Cell]] = {}
    for cell in missing:
        groups.setdefault(cell.anchor, []).append(cell)
    training = {
        name: Job("anchors", sweep.path, sweep.threads, cells[0])
        for name, cells in groups.items()
        if name not in donors
    }
    total = len(training) + len(missing)
    with tqdm(total=total, desc="sweep", unit="job", disable=not progress) as bar:
        for job, fault in team.run(work, list(training.values())):
            bar.update()
            if fault:
                for cell in groups.pop(job.cell.anchor):
                    sweep.note_failure(cell, f"its anchors: {fault}")
                    bar.update()
        jobs = [
            Job("cell", sweep.path, sweep.threads, cell, donors.get(name))
            for name, cells in groups.items()
            for cell in cells
        ]
        for job, fault in team.run(work, jobs):
            bar.update()
            if fault:
                sweep.note_failure(job.cell, fault)


@dataclass(frozen=True)
class SweepResult:
    """A sweep, finished or under way: read at any time.

    Attributes:
        path: its folder.
        grid: its cells.
        threads: CPU threads of each worker.

    Example:
        >>> sweep = load_sweep("runs/dwells")  # doctest: +SKIP
        >>> sweep.cells()["status"].value_counts()  # doctest: +SKIP
    """

    path: Path
    grid: Grid
    threads: int

    def is_complete(self, cell: Cell) -> bool:
        """True if the study of a cell is done."""
        return (self.path / "cells" / cell.name).is_dir()

    def study(self, cell: Cell) -> StudyResult:
        """The study of a cell.

        Raises:
            HysteresisError: a cell that is not complete, or a damaged file.
        """
        if not self.is_complete(cell):
            raise HysteresisError(f"the cell {cell} of {self.path} is not complete")
        return load_study(self.path / "cells" / cell.name)

    @property
    def complete(self) -> bool:
        """True when all cells are done."""
        return all(map(self.is_complete, self.grid.cells))

    def cells(self) -> pd.DataFrame:
        """One row a cell: `cell`, the axes, `status`, and `error` where it failed.

        The status is "complete", "failed", "unfinished" (at work, or cut short), or "missing".
        """
        rows = []
        for cell in self.grid.cells:
            failure = self.path / "failures" / f"{cell.name}.json"
            error, status = "", "missing"
            if self.is_complete(cell):
                status = "complete"
            elif failure.is_file():
                error, status = str(json.loads(failure.read_text())["error"]), "failed"
            elif (self.path / "unfinished" / cell.name).is_dir():
                status = "unfinished"
            rows.append({"cell": cell.name, **cell.values, "status": status, "error": error})
        return pd.DataFrame(rows)

    def table(self, name: str) -> pd.DataFrame:
        """A table of all complete studies, under `cell` and the axes; see `StudyResult.table`."""
        return self._collect(lambda study: study.table(name))

    def gaps(self) -> pd.DataFrame:
        """The gap over seeds, for each complete cell and measured relaxation."""
        return self._collect(StudyResult.gaps)

    def by_seed(self) -> pd.DataFrame:
        """`seed`, `relaxation`, `gap` and `lag`, for each complete cell.

        The lag is the mean height of the loop (see `loop_area`), averaged over the two branches.
        """
        return self._collect(_by_seed)

    def quasi_static(self, *, margin: float, relaxation: int = 0) -> list[QuasiStaticCell]:
        """Whether gap and lag stay at rate zero, for each combination of the axes but the dwell.

        Args:
            margin: the gap or lag, in logits, that is just too large to be called none.
            relaxation: updates after the loop at which the gap is taken.

        Raises:
            HysteresisError: a sweep without the axis ``schedule.dwell``, or not complete, a
                relaxation that was not measured, or what `quasi_static` refuses.
        """
        if RATE not in self.grid.axes:
            raise HysteresisError(
                f"{self.path} has no axis {RATE}: the quasi-static test compares rates"
            )
        refuse_too_few(self.grid)
        if not self.complete:
            counts = self.cells()["status"].value_counts().to_dict()
            raise HysteresisError(
                f"the sweep {self.path} is not complete ({_counted(counts)}): run it again"
            )
        table = self.by_seed()
        table = table[table["relaxation"] == relaxation].rename(columns={RATE: "dwell"})
        if table.empty:
            raise HysteresisError(f"relaxation {relaxation} was not measured in {self.path}")
        others = [name for name in self.grid.axes if name != RATE]
        if not others:
            return [QuasiStaticCell({}, quasi_static(table, margin=margin))]
        return [
            QuasiStaticCell(
                dict(zip(others, values, strict=True)), quasi_static(part, margin=margin)
            )
            for values, part in table.groupby(others, sort=False, dropna=False)
        ]

    def note_failure(self, cell: Cell, fault: str) -> None:
        """Keep what went wrong in a cell: a line, and a traceback under it where there is one."""
        error, _, trace = fault.partition("\n")
        note = {"error": error, "traceback": trace, **cell.values}
        text = json.dumps(note, indent=2, default=str) + "\n"
        write_file(self.path / "failures" / f"{cell.name}.json", text)

    def _collect(self, read: Callable[[StudyResult], pd.DataFrame]) -> pd.DataFrame:
        parts = []
        for cell in filter(self.is_complete, self.grid.cells):
            table = read(self.study(cell))
            labels = pd.DataFrame({"cell": cell.name, **cell.values}, index=table.index)
            kept = [name for name in table if name not in labels]
            parts.append(pd.concat([labels, table[kept]], axis=1))
        if not parts:
            raise HysteresisError(f"no cell of the sweep {self.path} is complete yet")
        return pd.concat(parts, ignore_index=True)


@dataclass(frozen=True)
class QuasiStaticCell:
    """The quasi-static test at one combination of the other axes.

    Attributes:
        values: what these axes are.
        test: the test over the dwells.
    """

    values: dict[str, Any]
    test: QuasiStatic


def load_sweep(path: Path | str) -> SweepResult:
    """Open a sweep's folder, finished or under way.

    Raises:
        HysteresisError: a folder that is not a sweep, or is damaged.
    """
    path = Path(path).absolute()
    data = _read(path)
    try:
        grid = Grid.from_dict(data["grid"])
    except HysteresisError as error:
        raise HysteresisError(f"{path / SWEEP} is damaged: {error}") from None
    return SweepResult(path, grid, int(data["threads"]))


def is_sweep(path: Path | str) -> bool:
    """True for the folder of a sweep."""
    return (Path(path) / SWEEP).is_file()


def refuse_too_few(grid: Grid) -> None:
    """Refuse a grid over dwells that the quasi-static test could not judge.

    Raises:
        HysteresisError: too few seeds or dwells, or too small a span of them.
    """
    for cell in grid.cells:
        dwells = [float(dwell) for dwell in grid.axes.get(RATE, ())]
        rows = [(seed, dwell, 0.0, 0.0) for seed in cell.config.seeds for dwell in dwells]
        table = pd.DataFrame(rows, columns=["seed", "dwell", "gap", "lag"])
        quasi_static(table, margin=1.0)


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        kind: train the anchors of a cell, or run its study.
        path: the sweep's folder.
        threads: CPU threads to compute with.
        cell: the cell.
        donor: a study elsewhere that has the anchors; unset means that they are in the folder.
    """

    kind: Literal["anchors", "cell"]
    path: Path
    threads: int
    cell: Cell
    donor: Path | None = None


def work(job: Job) -> str | None:
    """Do a job, from where an earlier worker left it; what went wrong, as text, or None."""
    try:
        with threads(job.threads):
            _WORK[job.kind](job)
    except Exception as error:
        return f"{describe(error)}\n{traceback.format_exc()}"
    return None


def _train(job: Job) -> None:
    with _alone(job.path, job.cell.anchor):
        train_anchors(job.cell.config, job.path / "anchors" / job.cell.anchor)


def _study(job: Job) -> None:
    name = job.cell.name
    folder, goal = job.path / "unfinished" / name, job.path / "cells" / name
    anchors = job.donor or job.path / "anchors" / job.cell.anchor
    with _alone(job.path, name):
        if goal.is_dir():
            return
        if (folder / MANIFEST).exists() and RunFolder.open(folder).has("tables/anchors.csv"):
            resume_study(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)  # killed as it began: nothing is in it
            run_study(job.cell.config, folder, anchors=anchors)
        goal.parent.mkdir(exist_ok=True)
        os.replace(folder, goal)


_WORK = {"anchors": _train, "cell": _study}


def _by_seed(study: StudyResult) -> pd.DataFrame:
    curve, measured = study.curve(), study.config.relaxation.measure_at
    lag = loop_area(study.table("loop")).groupby("seed")["lag"].mean().rename("lag")
    kept = curve[curve["relaxation"].isin(measured)].reset_index(drop=True)
    return kept.join(lag, on="seed")


@contextmanager
def _connected(workers: int | None, dask: str | None, path: Path) -> Iterator[Local | Cluster]:
    if dask is None:
        yield Local(workers)
        return
    with cluster(dask, path) as team:
        yield team


def _check_cells(team: Local | Cluster, grid: Grid) -> None:
    """See where the work is done that each cell's task, model and device can be made."""
    configs = {cell.config.of_anchors().hash: cell.config for cell in grid.cells}
    for _, fault in team.run(_possible, [list(configs.values())]):
        if fault:
            raise HysteresisError(fault)


def _possible(configs: list[StudyConfig]) -> str | None:
    for config in configs:
        try:
            check_possible(config)
        except HysteresisError as error:
            return str(error)
    return None


def _refuse_another(path: Path, grid: Grid) -> None:
    """Let pass a new path, an empty folder, and the folder of this sweep."""
    if is_sweep(path):
        data = _read(path)
        if data["grid"] != json.loads(grid.to_json()):
            raise HysteresisError(f"{path} holds a sweep of another grid: choose another folder")
        for package, now in versions().items():
            then = data["versions"].get(package)
            if then != now:
                raise HysteresisError(
                    f"the sweep {path} was begun with {package} {then}, here is {now}: go on with "
                    "those versions, or choose another folder"
                )
        return
    left = {path / LOCK, path / PROBE, path / f".{SWEEP}.tmp"}
    if path.exists() and not (path.is_dir() and left.issuperset(path.iterdir())):
        raise HysteresisError(f"{path} exists and is not an empty folder: choose another one")


def _begun(path: Path, grid: Grid, n_threads: int) -> SweepResult:
    """The sweep in this folder, begun if it is not yet there."""
    _refuse_another(path, grid)  # again, now that no other process can be beginning here
    if not is_sweep(path):
        data = {
            "format": FORMAT,
            "versions": versions(),
            "threads": n_threads,
            "grid": json.loads(grid.to_json()),
        }
        write_file(path / SWEEP, json.dumps(data, indent=2) + "\n")
    return load_sweep(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads((path / SWEEP).read_text())
    except FileNotFoundError:
        raise HysteresisError(f"{path} is not the folder of a sweep: no {SWEEP}") from None
    except (OSError, ValueError) as error:
        raise HysteresisError(f"{path / SWEEP} is damaged: {error}") from None
    entries = {"format": int, "versions": dict, "threads": int, "grid": dict}
    for name, kind in entries.items():
        if not isinstance(data, dict) or not isinstance(data.get(name), kind):
            raise HysteresisError(f"{path / SWEEP} is damaged: {name} is missing or wrong")
    if data["format"] != FORMAT:
        raise HysteresisError(f"{path} is a sweep of format {data['format']}, this reads {FORMAT}")
    return dict(data)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep a second call from the same sweep."""
    lock = FileLock(path / LOCK, timeout=0)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise HysteresisError(f"another process is running the sweep {path}") from None
    except OSError as error:
        raise HysteresisError(f"cannot write {path / LOCK}: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _alone(path: Path, name: str) -> Iterator[None]:
    """Wait for a worker that an earlier call left at the same job."""
    folder = path / "unfinished"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{name}.lock"):
        yield


def _donors(studies: Sequence[Path | str]) -> dict[str, Path]:
    """Studies that have anchors, by the hash of the anchors' settings."""
    donors = {}
    for path in studies:
        run = RunFolder.open(path)
        if not run.has("tables/anchors.csv"):
            raise HysteresisError(f"the study {run.path} has not trained its anchors yet")
        run.check_versions()
        donors[run.config.of_anchors().hash[:16]] = Path(path).absolute()
    return donors


def _counted(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.items())
