"""Many jobs on several processes: joblib's on one machine, or those of a Dask cluster.

A job is a function of one argument that can be pickled. It leaves its results on the disk, and
returns None, or a text that says what went wrong.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from joblib import Parallel, cpu_count, delayed, effective_n_jobs
from joblib.parallel import get_active_backend

from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.store import versions

T = TypeVar("T")
Work = Callable[[T], str | None]

DEATHS = 3
"""Times that the local processes may die in turn, with no job done between, before each job has
them to itself, so that it shows which one kills them."""
PATIENCE = 10.0
"""Seconds for a Dask scheduler to answer, and for its first worker to be there."""
ABSENCE = 300.0
"""Seconds that a Dask cluster may be without any worker while jobs are left."""
POLL = 0.2
"""Seconds between two looks at a Dask cluster."""
PROBE = ".probe"


class Local:
    """Joblib's workers: its loky processes, or whatever `joblib.parallel_config` has set.

    Attributes:
        workers: how many; unset means as many as joblib is configured for, one if it is not.
    """

    def __init__(self, workers: int | None = None) -> None:
        """Refuse a number of workers that there cannot be."""
        if workers is not None and workers < 1:
            raise HysteresisError(f"workers = {workers} must be at least 1")
        self.workers = workers

    @property
    def threads(self) -> int:
        """CPU threads for each worker: cores over workers."""
        return max(1, int(cpu_count()) // int(effective_n_jobs(self.workers)))

    def run(self, work: Work[T], jobs: Sequence[T]) -> Iterator[tuple[T, str | None]]:
        """Each job with what went wrong, as they end."""
        left, deaths = dict(enumerate(jobs)), 0
        # Ray's backend gives the results when all jobs have ended.
        unordered = get_active_backend()[0].supports_return_generator
        return_as = "generator_unordered" if unordered else "list"
        while left:
            alone = deaths >= DEATHS
            numbers = list(left)[: 1 if alone else None]
            calls = [delayed(_numbered)(work, number, left[number]) for number in numbers]
            parallel = Parallel(self.workers, batch_size=1, return_as=return_as)
            try:
                for number, fault in parallel(calls):
                    deaths = deaths if alone else 0
                    yield left.pop(number), fault
            except BrokenProcessPool:  # a worker was killed, and joblib gave the others up with it
                deaths += 1
                if alone:
                    deaths = 0
                    yield left.pop(numbers[0]), "its worker was killed, over and over: no memory?"


class Cluster:
    """The workers of a Dask cluster, of one thread each.

    Make it with `cluster`. Its jobs are submitted without joblib's Dask backend, which waits for
    ever on a job whose workers keep dying.

    Attributes:
        client: the connection to the scheduler.
        threads: CPU threads for each worker: the cores of its machine over the workers there, the
            least over the cluster.
    """

    def __init__(self, client: Any, threads: int) -> None:
        """Take over a client that is connected."""
        self.client, self.threads = client, threads

    def run(self, work: Work[T], jobs: Sequence[T]) -> Iterator[tuple[T, str | None]]:
        """Each job with what went wrong, as they end.

        Raises:
            HysteresisError: the scheduler is gone, or all workers are and none comes.
        """
        from distributed import as_completed

        futures = {self.client.submit(work, job, pure=False): job for job in jobs}
        ended = as_completed(futures, loop=self.client.loop)
        present = time.monotonic()
        while not ended.is_empty():
            time.sleep(POLL)
            for future in ended.next_batch(block=False):
                if future.status == "cancelled":
                    raise HysteresisError("the Dask scheduler is gone: start it, and go on")
                error = future.exception()
                yield futures[future], future.result() if error is None else describe(error)
            if _workers(self.client):
                present = time.monotonic()
            elif time.monotonic() - present > ABSENCE:
                raise HysteresisError(
                    f"all Dask workers are gone, for {ABSENCE:g} seconds: start some, and go on"
                )


class _Facts(NamedTuple):
    """What must hold of every worker of a cluster."""

    versions: dict[str, str]
    host: str
    cores: int
    sees: bool


@contextmanager
def cluster(address: str, folder: Path) -> Iterator[Cluster]:
    """Connect to a Dask scheduler, and see that its workers can do the work.

    Args:
        address: the scheduler's, such as ``tcp://10.0.0.1:8786``.
        folder: a folder that all workers must see under the same path; it is made.

    Raises:
        HysteresisError: dask.distributed is not installed, no scheduler answers, there is no
            worker, or one of them has several threads, other versions, or no such folder.
    """
    try:
        from distributed import Client
    except ImportError:
        raise HysteresisError(
            "a sweep on Dask needs the extra `cluster`: pip install 'tl-hysteresis[cluster]'"
        ) from None
    try:
        client = Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise HysteresisError(
            f"no Dask scheduler answers at {address}: {_first_line(error)}"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=PATIENCE)
        except TimeoutError:
            raise HysteresisError(f"the Dask scheduler at {address} has no worker") from None
        slots = {name: worker["nthreads"] for name, worker in _workers(client).items()}
        for name, n_threads in slots.items():
            if n_threads != 1:
                raise HysteresisError(
                    f"the worker {name} runs {n_threads} jobs in threads of one process, where "
                    "torch counts its threads for all of them: start it with `--nthreads 1`"
                )
        with _probe(folder) as probe:
            found = client.run(_facts, str(probe), on_error="return")
        for name, facts in found.items():
            _refuse_unlike(name, facts, folder)
        on_host = Counter(facts.host for facts in found.values())
        yield Cluster(client, min(max(1, f.cores // on_host[f.host]) for f in found.values()))


def describe(error: BaseException) -> str:
    """An exception as a line of text."""
    if isinstance(error, HysteresisError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _numbered(work: Work[T], number: int, job: T) -> tuple[int, str | None]:
    return number, work(job)


@contextmanager
def _probe(folder: Path) -> Iterator[Path]:
    """A file that is there for a moment, for workers to find."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROBE).touch()
    except OSError as error:
        raise HysteresisError(f"cannot write {folder / PROBE}: {error.strerror}") from None
    try:
        yield folder / PROBE
    finally:
        (folder / PROBE).unlink(missing_ok=True)


def _facts(probe: str) -> _Facts:
    """Runs on the worker."""
    return _Facts(versions(), platform.node(), int(cpu_count()), Path(probe).is_file())


def _workers(client: Any) -> dict[str, Any]:
    return dict(client.scheduler_info(n_workers=-1)["workers"])


def _refuse_unlike(name: str, facts: _Facts | BaseException, folder: Path) -> None:
    """Refuse a worker on which numbers could differ, or whose results would be lost."""
    if isinstance(facts, BaseException):
        raise HysteresisError(
            f"the worker {name} cannot run this version of tl_hysteresis: {describe(facts)}"
        )
    for package, here in versions().items():
        there = facts.versions.get(package)
        if there != here:
            raise HysteresisError(
                f"the worker {name} has {package} {there}, here is {here}: all numbers of a sweep "
                "are to come from the same versions"
            )
    if not facts.sees:
        raise HysteresisError(
            f"the worker {name} does not see the folder {folder}: a sweep needs one that all "
            "workers share"
        )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
