"""The command line: compose, print, exit code. Nothing is computed here.

Heavy modules are imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tl_hysteresis.errors import HysteresisError

if TYPE_CHECKING:
    import pandas as pd

    from tl_hysteresis.config import StudyConfig
    from tl_hysteresis.results import StudyResult

app = typer.Typer(
    name="tl-hysteresis",
    help="Does the path by which training reached a data mixture leave a trace in the model?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path | None, typer.Option("--out", help="New folder for the run.")]
Seeds = Annotated[
    list[int] | None,
    typer.Option("--seeds", help="A seed; repeat it for more (--seeds 0 --seeds 1)."),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="A reduced run in under a minute, marked as such.")
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", help="Processes here; unset, as many as cores."),
]
Dask = Annotated[
    str | None, typer.Option("--dask", help="A Dask scheduler, to run on its workers instead.")
]
Folder = Annotated[Path, typer.Argument(help="A run folder.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from tl_hysteresis import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Does the path by which training reached a data mixture leave a trace in the model?"""


@app.command()
def reproduce(
    out: Out = None,
    seeds: Seeds = None,
    device: Device = None,
    threads: Threads = None,
    quick: Quick = False,
    full: Annotated[
        bool, typer.Option("--full", help="Go on with what `examine` does, to its paragraph.")
    ] = False,
    workers: Workers = None,
) -> None:
    """Run the study with its defaults, and set its numbers beside the paper's.

    Called again, it continues the same run, or shows it if it is complete.
    """
    from tl_hysteresis.config import StudyConfig

    config = _with_flags(StudyConfig(), seeds, device, threads, quick)
    from tl_hysteresis.store import RunFolder
    from tl_hysteresis.study import resume_study, run_study

    if full:
        from tl_hysteresis.grid import Grid
        from tl_hysteresis.sweep import refuse_too_few

        refuse_too_few(Grid.of_dwells(config))
    folder = out or Path("runs", "reproduce-quick" if quick else "reproduce")
    begun = (folder / "manifest.json").exists() and RunFolder.open(folder).config == config
    with _resumable(folder):
        if begun:
            typer.echo(f"continuing {folder}")
            result = resume_study(folder, progress=True)
        else:
            result = run_study(config, folder, progress=True)
    _print_study(result)
    if full:
        _examine(folder, workers)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="Settings in TOML, as `init` writes them.")],
    out: Out = None,
    seeds: Seeds = None,
    device: Device = None,
    threads: Threads = None,
    quick: Quick = False,
) -> None:
    """Run a study with the settings of a TOML file into a new folder."""
    from tl_hysteresis.config import StudyConfig

    settings = _with_flags(StudyConfig.from_toml(config), seeds, device, threads, quick)
    from tl_hysteresis.study import run_study  # seconds, which a bad setting need not wait for

    folder = out or Path("runs", config.stem)
    with _resumable(folder):
        result = run_study(settings, folder, progress=True)
    _print_study(result)


@app.command()
def resume(
    folder: Folder,
    accept_unconverged: Annotated[
        bool, typer.Option(help="Go on although an anchor has not converged.")
    ] = False,
) -> None:
    """Continue a run that was cut short; it ends as it would have."""
    from tl_hysteresis.study import resume_study

    with _resumable(folder):
        result = resume_study(folder, accept_unconverged=accept_unconverged, progress=True)
    _print_study(result)


@app.command()
def memory(folder: Folder) -> None:
    """Ask a finished study what holds the memory: weights, optimizer state, hidden parts."""
    from tl_hysteresis.findings import findings, findings_summary
    from tl_hysteresis.memory import examine_memory

    with _resumable(folder, "memory"):
        result = examine_memory(folder, progress=True)
    _print_tables(findings_summary(findings(result)))


@app.command()
def examine(folder: Folder, workers: Workers = None, dask: Dask = None) -> None:
    """Ask a finished study what holds its memory, and whether it is hysteresis.

    Runs the memory experiments, and the study again at dwells from 2 to 64, beside it in
    FOLDER-dwells; ends with a paragraph for a paper, and keeps its numbers in
    FOLDER/tables/findings.csv.
    """
    _examine(folder, workers, dask)


@app.command()
def sweep(
    grid: Annotated[Path, typer.Argument(help="TOML with the tables `base` and `axes`.")],
    out: Out = None,
    workers: Workers = None,
    dask: Dask = None,
) -> None:
    """Run a study for each cell of a grid; again, those that are missing or failed."""
    from tl_hysteresis.grid import Grid

    cells = Grid.from_toml(grid)
    from tl_hysteresis.summary import sweep_summary
    from tl_hysteresis.sweep import run_sweep

    folder = out or Path("runs", grid.stem)
    if dask is None:
        workers = workers or _cores_over(max(cell.config.threads or 1 for cell in cells.cells))
    with _resumable(folder, f"sweep {quote(str(grid))} --out"):
        result = run_sweep(cells, folder, workers=workers, dask=dask, progress=True)
    _print_tables(sweep_summary(result))
    if not result.complete:
        raise typer.Exit(1)


@app.command()
def verdict(
    folder: Annotated[Path, typer.Argument(help="The folder of a sweep over schedule.dwell.")],
    margin: Annotated[
        float | None,
        typer.Option("--margin", help="Gap just too large to be called none [the grid's setting]."),
    ] = None,
    relaxation: Annotated[
        int, typer.Option("--relaxation", help="Updates after the loop, of the gap.")
    ] = 0,
) -> None:
    """Judge from a sweep over dwells whether the memory is hysteresis."""
    from tl_hysteresis.findings import verdict_summary
    from tl_hysteresis.sweep import load_sweep

    result = load_sweep(folder)
    margin = result.grid.cells[0].config.memory.margin if margin is None else margin
    for cell in result.quasi_static(margin=margin, relaxation=relaxation):
        for name, value in cell.values.items():
            typer.echo(f"{name} = {value}")
        _print_tables(verdict_summary(cell.test))


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A run folder, or that of a sweep.")],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the comparison with the paper as Markdown.")
    ] = False,
) -> None:
    """Print the results of a run or a sweep, as far as they are there."""
    from tl_hysteresis.findings import findings, findings_summary
    from tl_hysteresis.results import load_study
    from tl_hysteresis.summary import sweep_summary
    from tl_hysteresis.sweep import is_sweep, load_sweep
    from tl_hysteresis.traces import MemoryResult

    if is_sweep(folder):
        _print_tables(sweep_summary(load_sweep(folder)))
        return
    result = load_study(folder)
    if markdown:
        _print_markdown(result)
        return
    _print_study(result)
    if result.folder.has("tables/findings.csv"):
        _print_findings(result.table("findings"))
    elif (memory := MemoryResult(result)).complete:
        _print_tables(findings_summary(findings(memory)))


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("study.toml"),
) -> None:
    """Write a config with every setting at its default, each with its meaning."""
    from tl_hysteresis.config import StudyConfig
    from tl_hysteresis.store import write_file

    if path.exists():
        raise HysteresisError(f"{path} exists: choose another name")
    write_file(path, StudyConfig().to_toml())
    typer.echo(f"wrote {path}; run it with: tl-hysteresis run {path}")


def main() -> None:
    """Entry point: errors of this package print as one line and exit with code 2."""
    try:
        app()
    except HysteresisError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except (OSError, MemoryError, OverflowError) as error:
        typer.echo(f"error: {type(error).__name__}: {error}", err=True)
        sys.exit(2)


def _with_flags(
    config: StudyConfig,
    seeds: list[int] | None,
    device: str | None,
    threads: int | None,
    quick: bool,
) -> StudyConfig:
    """The settings with the flags that were given in the place of the file's."""
    given: dict[str, Any] = {"seeds": seeds, "device": device, "threads": threads}
    given = {name: value for name, value in given.items() if value is not None}
    config = type(config).from_dict(config.model_dump() | given)
    return config.as_quick() if quick else config


@contextmanager
def _resumable(folder: Path, command: str = "resume") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        begun = any((folder / name).exists() for name in ("manifest.json", "sweep.json"))
        hint = (
            f"; go on with: tl-hysteresis {command} {quote(str(folder))}"
            if begun
            else " before the run began"
        )
        typer.echo(f"\nstopped{hint}", err=True)
        raise typer.Exit(130) from None


def _examine(folder: Path, workers: int | None, dask: str | None = None) -> None:
    from tl_hysteresis.findings import examine_study
    from tl_hysteresis.store import RunFolder

    if dask is None:
        workers = workers or _cores_over(RunFolder.open(folder).config.threads or 1)
    with _resumable(folder, "examine"):
        table = examine_study(folder, workers=workers, dask=dask, progress=True)
    _print_findings(table)


def _cores_over(threads: int) -> int:
    """How many workers with so many threads each a machine has cores for."""
    from joblib import cpu_count

    return max(1, int(cpu_count()) // threads)


def _print_findings(table: pd.DataFrame) -> None:
    """The tables, then the paragraph."""
    from rich.console import Console

    from tl_hysteresis.findings import findings_summary, paragraph

    _print_tables(findings_summary(table))
    Console(markup=False, highlight=False).print(f"\n{paragraph(table)}")


def _print_study(result: StudyResult) -> None:
    """The warnings first, then each table with what it says."""
    from rich.console import Console

    from tl_hysteresis.summary import caveats, compare_with_paper, quick_mark, summary

    console = Console(markup=False, highlight=False)
    _print_tables(summary(result))
    if result.folder.complete:
        console.print(f"Beside the paper{quick_mark(result)}", style="bold")
        for row in compare_with_paper(result).itertuples():
            console.print(f"\n{row.quantity}\n  paper   {row.paper}\n  here    {row.here}")
            console.print(f"  agrees  {row.agrees} (yes: {row.rule})")
    for warning in caveats(result):
        console.print(f"\nwarning: {warning}", style="bold red")
    print(f"\ntables and checkpoints: {result.folder.path}")


def _print_tables(tables: Mapping[str, pd.DataFrame]) -> None:
    """Each table under its title."""
    from pandas.api.types import is_numeric_dtype
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, highlight=False)
    for title, frame in tables.items():
        table = Table(title=title, title_justify="left", title_style="bold")
        for column in frame.columns:
            numeric = is_numeric_dtype(frame[column])
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in frame.astype(object).itertuples(index=False):
            table.add_row(*(Text(_cell(value)) for value in row))
        console.print(table)


def _print_markdown(result: StudyResult) -> None:
    """The comparison with the paper as a table to paste, and its warnings."""
    from tl_hysteresis.summary import caveats, compare_with_paper, quick_mark

    table = compare_with_paper(result)
    typer.echo(f"Beside the paper{quick_mark(result)}\n")
    rows: list[Iterable[Any]] = [
        table.columns,
        ["---"] * len(table.columns),
        *table.itertuples(index=False),
    ]
    for row in rows:
        typer.echo(f"| {' | '.join(map(str, row))} |")
    for warning in caveats(result):
        typer.echo(f"\nWarning: {warning}.")


def _cell(value: Any) -> str:
    if value is None or value != value or str(value) == "<NA>":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
