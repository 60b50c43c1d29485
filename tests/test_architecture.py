"""Imports run one way, downwards, so that the data can be followed from task to table."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tl_hysteresis

PACKAGE = Path(tl_hysteresis.__file__).parent
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "statistics": {"errors"},
    "relaxation": {"errors", "statistics"},
    "quasistatic": {"errors", "statistics"},
    "tasks": {"config", "errors"},
    "sentences": {"config", "errors", "tasks"},
    "factory": {"config", "errors", "sentences", "tasks"},
    "schedules": {"config", "errors", "tasks"},
    "models": {"config", "errors"},
    "forward": set(),
    "training": {"config", "errors", "forward", "models", "schedules", "tasks"},
    "measures": {"errors", "tasks"},
    "sites": {"errors", "tasks"},
    "checks": {"errors", "sites"},
    "interventions": {"checks", "errors", "sites", "tasks"},
    "store": {"config", "errors"},
    "replacement": {"errors", "interventions", "models", "sites", "store", "tasks"},
    "patching": {"checks", "errors", "interventions", "measures", "sites", "tasks"},
    "routes": {
        *("errors", "interventions", "measures", "models", "patching", "replacement", "sites"),
        "tasks",
    },
    "attribution": {"checks", "errors", "interventions", "measures", "routes", "sites", "tasks"},
    "comparison": {"errors", "routes", "statistics"},
    "paths": {"errors", "interventions", "measures", "patching", "routes", "sites", "tasks"},
    "transplants": {"errors", "interventions", "measures", "models", "routes", "sites", "tasks"},
    "readouts": {"errors", "interventions", "measures", "sites", "tasks"},
    "results": {
        *("comparison", "config", "errors", "factory", "models", "routes", "schedules"),
        *("statistics", "store", "tasks"),
    },
    "summary": {"results", "statistics", "store", "sweep"},
    "convergence": {"config"},
    "stages": {"errors", "measures", "results", "schedules", "store", "tasks", "training"},
    "study": {
        *("config", "convergence", "errors", "factory", "models", "results", "routes"),
        *("schedules", "stages", "store", "tasks", "training"),
    },
    "traces": {"quasistatic", "relaxation", "results", "schedules", "statistics"},
    "memory": {
        *("comparison", "config", "errors", "models", "results", "routes", "schedules", "sites"),
        *("stages", "store", "study", "tasks", "traces", "training"),
    },
    "grid": {"config", "errors"},
    "workers": {"errors", "store"},
    "sweep": {
        *("config", "errors", "grid", "quasistatic", "results", "store", "study", "workers"),
    },
    "findings": {
        *("grid", "memory", "quasistatic", "relaxation", "results", "statistics", "store"),
        *("summary", "sweep", "traces"),
    },
    "cli": {
        *("config", "errors", "findings", "grid", "memory", "results", "store", "study"),
        *("summary", "sweep", "traces"),
    },
    "__init__": set(),
    "__main__": {"cli"},
}


def imports_of(module: Path) -> set[str]:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    found = [
        node.module.split(".")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    return {parts[1] for parts in found if parts[0] == "tl_hysteresis" and len(parts) > 1}


@pytest.mark.parametrize("module", sorted(path.stem for path in PACKAGE.glob("*.py")))
def test_each_module_imports_only_what_lies_below_it(module: str) -> None:
    assert imports_of(PACKAGE / f"{module}.py") <= MAY_IMPORT[module]


def test_the_table_has_no_cycle() -> None:
    placed: set[str] = set()
    while len(placed) < len(MAY_IMPORT):
        ready = {name for name, below in MAY_IMPORT.items() if below <= placed} - placed
        assert ready, f"a cycle among {sorted(set(MAY_IMPORT) - placed)}"
        placed |= ready


def test_only_models_constructs_a_hooked_transformer() -> None:
    for path in PACKAGE.glob("*.py"):
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "HookedTransformer" not in calls or path.stem == "models"


def test_every_public_name_exists() -> None:
    for name in tl_hysteresis.__all__:
        assert getattr(tl_hysteresis, name) is not None


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, tl_hysteresis, tl_hysteresis.cli;"
        "print([m for m in ('torch', 'transformer_lens', 'pandas', 'scipy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
