"""Stop a study on purpose, in a process of its own, at a chosen moment of a chosen write.

Loading torch and TransformerLens takes seconds, so a server process loads them once, and each
study runs in a fork of it.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from tl_hysteresis.cli import main

Moment = Literal["half", "whole", "renamed"]
MOMENTS: tuple[Moment, ...] = ("half", "whole", "renamed")

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "rich.console", "rich.table", "tl_hysteresis.study"])


@dataclass(frozen=True)
class Stop:
    """What happens to a process, and when.

    Attributes:
        write: which write of a file, counted from 0 for each process.
        moment: "half" of the bytes stand in the temporary file; the "whole" of them do, but under
            the temporary name; it is "renamed", and the next write has not begun.
        how: a signal, or "full" for a disk that is full from then on.
    """

    write: int
    moment: Moment
    how: Literal["SIGKILL", "SIGINT", "full"] = "SIGKILL"

    def at(self, write: int, moment: Moment) -> bool:
        """True if the process is to be stopped now."""
        now = write == self.write and moment == self.moment
        return now or (self.how == "full" and write > self.write)

    def act(self) -> None:
        if self.how == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.kill(os.getpid(), getattr(signal, self.how))


def run_command(*arguments: object, log: Path, stop: Stop | None = None) -> int:
    """Run the command line in a process of its own, and return its exit code (-9 for SIGKILL).

    What it prints goes to `log`, and the names of the files that it wrote to `log` + ".writes".
    """
    process = SERVER.Process(target=_run, args=([str(a) for a in arguments], log, stop))
    process.start()
    process.join(timeout=100)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{arguments} hangs: {log.read_text()}")
    return process.exitcode


def writes_of(log: Path) -> list[str]:
    """Names of the files that a process wrote, one for each write."""
    return _writes(log).read_text().split()


def _writes(log: Path) -> Path:
    return log.with_name(f"{log.name}.writes")


def _run(arguments: list[str], log: Path, stop: Stop | None) -> None:
    sys.argv = ["tl-hysteresis", *arguments]
    tqdm.set_lock(threading.RLock())  # the default is a semaphore, which a killed process leaks
    with (
        log.open("w") as output,
        _writes(log).open("w", buffering=1) as writes,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        written: list[str] = []
        replace = os.replace

        def fsync_or_stop(descriptor: int) -> None:
            if stop is not None and stop.at(len(written), "half"):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                stop.act()
            # Left out: a flush to the disk takes its time, and only a power cut could tell.

        def replace_or_stop(source: Path, target: Path) -> None:
            if stop is not None and stop.at(len(written), "whole"):
                stop.act()
            replace(source, target)
            if stop is not None and stop.at(len(written), "renamed"):
                stop.act()
            written.append(target.name)
            writes.write(f"{target.name}\n")

        os.fsync, os.replace = fsync_or_stop, replace_or_stop  # type: ignore[assignment]
        main()
