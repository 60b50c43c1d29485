"""The notebooks run to their end, and are stored with small outputs that hold nothing of a machine.

Needs the `notebooks` extra. A kernel is a process of its own: it inherits the limits on threads of
the process that runs the tests, but not its filters of warnings.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
TIMEOUT = 600
"""Seconds for one cell."""
MAX_BYTES = 300_000
OF_A_MACHINE = {
    "an absolute path": re.compile(r"(?<![\w.:/<])/\w[\w.-]*/\w|\b[A-Za-z]:\\\w"),
    "a URL": re.compile(r"https?://", re.IGNORECASE),
}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(value: Any) -> Iterator[str]:
    """All strings in an output, at any depth, whatever their type."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)


def noise(notebook: Any) -> list[str]:
    """What cells wrote to stderr."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.text for output in outputs if output.get("name") == "stderr"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_to_its_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    copy = Path(shutil.copytree(FOLDER, tmp_path / "notebooks")) / name
    notebook = read(copy)
    nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(copy.parent)}},
    ).execute()
    assert all(cell.execution_count for cell in code_cells(notebook))
    assert noise(notebook) == []


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_is_stored_as_it_ran_from_top_to_bottom(name: str) -> None:
    notebook = read(FOLDER / name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    assert noise(notebook) == []
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_its_outputs_hold_nothing_of_a_machine_and_are_small(name: str) -> None:
    for number, cell in enumerate(code_cells(read(FOLDER / name)), start=1):
        for text in texts(cell.outputs):
            for what, pattern in OF_A_MACHINE.items():
                found = pattern.search(text)
                assert found is None, f"cell {number} shows {what}: {found and found[0]!r}"
    assert (FOLDER / name).stat().st_size < MAX_BYTES


@pytest.mark.parametrize("text", ["/home/me/x", "in (/tmp/a.py)", "C:\\me", "see https://x.org"])
def test_paths_and_urls_are_recognised(text: str) -> None:
    assert any(pattern.search(text) for pattern in OF_A_MACHINE.values())


@pytest.mark.parametrize("text", ["a / b", "0.5/2", "</td>", "<br/>", "logits/update", "L0H1"])
def test_other_text_is_not_taken_for_a_path(text: str) -> None:
    assert not any(pattern.search(text) for pattern in OF_A_MACHINE.values())
