"""Shapes and types are checked while the tests run; users do not pay for it."""

import os
from collections.abc import Iterator

os.environ.setdefault("TQDM_DISABLE", "1")

import jaxtyping
import pytest
from jaxtyping import install_import_hook

# The tensor modules; `config.py` is checked by pydantic itself.
install_import_hook(
    [
        f"tl_hysteresis.{module}"
        for module in (
            "tasks",
            "sentences",
            "factory",
            "schedules",
            "models",
            "forward",
            "training",
            "measures",
            "sites",
            "checks",
            "interventions",
            "replacement",
            "patching",
            "routes",
            "attribution",
            "comparison",
            "paths",
            "transplants",
            "readouts",
            "statistics",
            "relaxation",
            "quasistatic",
            "results",
            "summary",
            "convergence",
            "stages",
            "study",
            "memory",
            "traces",
            "findings",
            "grid",
            "workers",
            "sweep",
        )
    ],
    "beartype.beartype",
)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Types unchecked, as for users: jaxtyping would refuse them before the package can."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
