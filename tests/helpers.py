"""What several test files share."""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tl_hysteresis.cli import main
from tl_hysteresis.config import StudyConfig


def tiny_config(**changes: Any) -> StudyConfig:
    """A study of about a second; `changes` replace or extend its settings, table by table."""
    settings: dict[str, Any] = {
        "seeds": [0, 1],
        "threads": 1,
        "checkpoint_every": 3,
        "task": {"n_keys": 6, "n_values": 8, "n_pairs": 3},
        "model": {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_mlp": 16},
        "optimizer": {"batch_size": 8},
        "anchor": {"updates": 12, "evaluate_every": 4, "require_convergence": False},
        "schedule": {"steps": 4, "dwell": 2},
        "relaxation": {"measure_at": [0, 1, 3]},
        "measurement": {"conflict_trials": 16, "patching_trials": 8},
    }
    for name, value in changes.items():
        old = settings.get(name)
        settings[name] = old | value if isinstance(old, dict) else value
    return StudyConfig.from_dict(settings)


@dataclass(frozen=True)
class Answer:
    """What a command of the command line gives back."""

    code: int
    out: str
    err: str


def command(*arguments: object) -> Answer:
    """Run the command line in this process; a shell would see the same exit code and texts."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["tl-hysteresis", *map(str, arguments)]),
        mock.patch.dict("os.environ", {"COLUMNS": "200"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return Answer(code, out.getvalue(), err.getvalue())


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of every file under a folder but its lock, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def results_in(folder: Path) -> dict[str, bytes]:
    """As `files_in`, without what `timings.json` says: seconds differ from run to run."""
    return {
        name: b"" if name == "timings.json" else data for name, data in files_in(folder).items()
    }
