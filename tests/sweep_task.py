"""A task that waits, fails, or dies for as long as a file beside it says so."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from own_task import FirstToken

from tl_hysteresis.tasks import Trials


class Stubborn(Exception):
    """Cannot be pickled, as exceptions that hold a connection cannot."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


@dataclass(frozen=True)
class Guarded(FirstToken):
    """Looks at its folder each time that a study patches activations: its last stage.

    ``wait``: waits until there is no such file; ``fail``: fails where `rare` is what stands in it;
    ``kill``: removes the file and kills its process.
    """

    folder: str = ""

    def corrupt(self, trials: Trials, corruption: str, *, rng: np.random.Generator) -> Trials:
        home = Path(self.folder)
        while (home / "wait").exists():
            time.sleep(0.02)
        if (home / "fail").exists() and (home / "fail").read_text() == str(self.rare):
            raise Stubborn(f"no trials at {self.rare}")
        if (home / "kill").exists():
            (home / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().corrupt(trials, corruption, rng=rng)


def lethal(job: int) -> str | None:
    """A job for a worker: 2 kills it, 3 goes wrong."""
    if job == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "three" if job == 3 else None
