"""Run folders: files written whole or not at all, named in a manifest, and verified on reading.

A run folder holds

- ``config.json``, the settings, and ``manifest.json``: versions, threads, device, the SHA-256 of
  each finished file, and whether the run is complete;
- ``checkpoints/*.safetensors``, parameters and optimizer states, and ``tables/*.csv``;
- ``progress.safetensors``, the training state of the stage that is under way, while there is one;
- ``timings.json``, seconds for each stage. It is the only file that differs between two equal runs.

A file counts once the manifest names it. A run killed before that writes the file again. Killed
before there is a manifest, it has not begun: it is started again, in the same folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.errors import HysteresisError

FORMAT = 1
CONFIG, MANIFEST, PROGRESS, TIMINGS, LOCK = (
    "config.json",
    "manifest.json",
    "progress.safetensors",
    "timings.json",
    ".lock",
)
MANIFEST_ENTRIES = {
    "config_hash": str,
    "versions": dict,
    "threads": int,
    "complete": bool,
    "files": dict,
}
PACKAGES = ("tl-hysteresis", "torch", "transformer-lens", "numpy", "pandas", "scipy")


@dataclass
class RunFolder:
    """The files of one study.

    Attributes:
        path: the folder.
        config: the study's settings.
        manifest: what stands in ``manifest.json``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as home:
        ...     run = RunFolder.create(Path(home) / "run", StudyConfig(), threads=1)
        ...     run.write_table("toy", pd.DataFrame({"seed": [0], "margin": [0.1]}))
        ...     RunFolder.open(run.path).read_table("toy")["margin"].item()
        0.1
    """

    path: Path
    config: StudyConfig
    manifest: dict[str, Any] = field(repr=False)

    @classmethod
    def create(cls, path: Path | str, config: StudyConfig, *, threads: int) -> RunFolder:
        """A new run folder, complete with settings and manifest.

        Raises:
            HysteresisError: a path that exists, or a place that cannot be written.
        """
        path = Path(path)
        _refuse_what_is_there(path, config)
        data = config.to_json().encode()
        run = cls(
            path,
            config,
            {
                "format": FORMAT,
                "config_hash": _sha256(data),
                "versions": versions(),
                "machine": platform.machine(),
                "threads": threads,
                "device": config.device,
                "complete": False,
                "files": {},
            },
        )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HysteresisError(f"cannot make the folder {path}: {error.strerror}") from None
        with run.locked():
            # Again, now that no other process can be beginning here.
            _refuse_what_is_there(path, config)
            _write(path / CONFIG, data)
            run._write_manifest()
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run folder.

        Raises:
            HysteresisError: a folder that is not a run, of another format, or whose settings were
                edited after it began.
        """
        path = Path(path)
        for name in (CONFIG, MANIFEST):
            if not (path / name).is_file():
                raise HysteresisError(f"{path} is not a run folder: it has no {name}")
        manifest = _read_json(path / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise HysteresisError(
                f"{path} is a run folder of format {manifest.get('format')}; "
                f"this version reads format {FORMAT}"
            )
        for name, kind in MANIFEST_ENTRIES.items():
            if not isinstance(manifest.get(name), kind):
                raise HysteresisError(
                    f"{path / MANIFEST} is damaged: {name} = {manifest.get(name)!r}"
                )
        data = _read(path / CONFIG)
        try:
            config = StudyConfig.from_json(data.decode())
        except (HysteresisError, UnicodeDecodeError) as error:
            raise HysteresisError(f"{path / CONFIG}: {error}") from None
        if _sha256(data) != manifest["config_hash"]:
            raise HysteresisError(
                f"{path / CONFIG} is not the config that this run began with: restore it, "
                "or start another run"
            )
        if config.to_json().encode() != data:
            raise HysteresisError(
                f"{path} was written by a version of this program with other settings: "
                "read it with that version"
            )
        return cls(path, config, manifest)

    @property
    def complete(self) -> bool:
        """True when every stage of the study is done."""
        return bool(self.manifest["complete"])

    @property
    def is_of_this_source(self) -> bool:
        """True if the run was begun by the very modules that are running."""
        return bool(self.manifest["versions"].get("source") == _source_hash())

    def check_versions(self) -> None:
        """Refuse to continue a run under other versions, which would mix two sets of numbers.

        Raises:
            HysteresisError: a package whose version differs from the one that began the run.
        """
        if not self.is_of_this_source:
            raise HysteresisError(
                f"{self.path} was begun by another version of this program's source: "
                "continue it with that version, or start again in another folder"
            )
        for package, now in versions().items():
            then = self.manifest["versions"].get(package)
            if then != now:
                raise HysteresisError(
                    f"{self.path} was begun with {package} {then}, here is {now}: "
                    "a run is continued with the versions that began it"
                )

    def has(self, name: str) -> bool:
        """True if the manifest names this file, such as ``tables/loop.csv``: it is finished."""
        return name in self.manifest["files"]

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        """Write ``tables/{name}.csv``; floats are written so that they read back to the bit."""
        buffer = io.StringIO()
        table.to_csv(buffer, index=False, lineterminator="\n")
        self._finish(f"tables/{name}.csv", buffer.getvalue().encode())

    def read_table(self, name: str) -> pd.DataFrame:
        """Read ``tables/{name}.csv``.

        Raises:
            HysteresisError: a table that is missing, or is not what was written.
        """
        data = self._verified(f"tables/{name}.csv")
        # Python's own float() reads back to the bit; the C parser of older pandas does not.
        return pd.read_csv(io.BytesIO(data), engine="python")

    def write_checkpoint(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write ``checkpoints/{name}.safetensors``."""
        self._finish(f"checkpoints/{name}.safetensors", save_safetensors(_plain(tensors)))

    def read_checkpoint(self, name: str) -> dict[str, Tensor]:
        """Read ``checkpoints/{name}.safetensors``.

        Raises:
            HysteresisError: a checkpoint that is missing, or is not what was written.
        """
        return _tensors(self._verified(f"checkpoints/{name}.safetensors"), name)

    def adopt(self, other: RunFolder, *names: str) -> None:
        """Take over finished files of another run, such as ``tables/anchors.csv``.

        Raises:
            HysteresisError: a file that the other run does not have, or that is damaged.
        """
        for name in names:
            self._finish(name, other._verified(name))

    def write_progress(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the training state of the stage under way, in the place of the one before."""
        # The file changes while the manifest does not, so it carries its own stage and hash.
        tensors = _plain(tensors)
        labels = {
            "stage": stage,
            "config": self.config.hash,
            "sha256": _sha256(save_safetensors(tensors)),
        }
        _write(self.path / PROGRESS, save_safetensors(tensors, metadata=labels))

    def read_progress(self, stage: str) -> dict[str, Tensor] | None:
        """The training state of a stage that was cut short; None if it had not begun.

        Raises:
            HysteresisError: a file that is damaged or belongs to another run.
        """
        path = self.path / PROGRESS
        if not path.exists():
            return None
        data = _read(path)
        try:
            tensors, labels = _tensors(data, PROGRESS), _labels(data)
            intact = labels.get("sha256") == _sha256(save_safetensors(tensors))
        except HysteresisError:
            intact = False
        if not intact:
            raise HysteresisError(f"{path} is damaged: delete it to repeat the stage under way")
        if labels.get("config") != self.config.hash:
            raise HysteresisError(f"{path} belongs to a run of another config: delete it")
        return tensors if labels.get("stage") == stage else None

    def finish(self) -> None:
        """Mark the run as complete and drop the training state that is needed no more."""
        (self.path / PROGRESS).unlink(missing_ok=True)
        self.manifest["complete"] = True
        self._write_manifest()

    def clean(self) -> None:
        """Remove temporary files that a killed run left behind."""
        for leftover in self.path.rglob(".*.tmp"):
            leftover.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from working on the same run; freed when this one ends or dies.

        Raises:
            HysteresisError: another process is working on it.
        """
        lock = FileLock(self.path / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise HysteresisError(f"another process is working on {self.path}") from None
        except OSError as error:
            raise HysteresisError(f"cannot write {self.path / LOCK}: {error.strerror}") from None
        try:
            yield
        finally:
            lock.release()

    def note(self, **facts: Any) -> None:
        """Add facts to the manifest."""
        self.manifest |= facts
        self._write_manifest()

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Add to the time that a stage has taken, in ``timings.json``."""
        path = self.path / TIMINGS
        try:
            timings = {name: float(value) for name, value in _read_json(path).items()}
        except (HysteresisError, TypeError, ValueError):
            timings = {}  # nothing depends on them
        timings[stage] = round(timings.get(stage, 0.0) + seconds, 3)
        _write(path, _json(timings))

    def verify(self) -> None:
        """Read every finished file and compare it with the manifest.

        Raises:
            HysteresisError: a file that is missing, or is not what was written.
        """
        for name in self.manifest["files"]:
            self._verified(name)

    def _finish(self, name: str, data: bytes) -> None:
        digest, finished = _sha256(data), self.manifest["files"]
        if finished.get(name, digest) != digest:
            # Killed between the file and its manifest, the run would seem damaged.
            del finished[name]
            self._write_manifest()
        _write(self.path / name, data)
        self.manifest["files"] = dict(sorted({**finished, name: digest}.items()))
        self._write_manifest()

    def _verified(self, name: str) -> bytes:
        path, known = self.path / name, self.manifest["files"]
        if name not in known:
            state = "is complete" if self.complete else "is not complete"
            raise HysteresisError(f"the run {self.path} has no {name} (the run {state})")
        data = _read(path)
        if _sha256(data) != known[name]:
            raise HysteresisError(
                f"{path} is damaged, or not this run's: its SHA-256 is not the manifest's"
            )
        return data

    def _write_manifest(self) -> None:
        _write(self.path / MANIFEST, _json(self.manifest))


def versions() -> dict[str, str]:
    """What numbers may depend on: versions of Python and packages, hash of this one's source."""
    return {
        "python": platform.python_version(),
        "source": _source_hash(),
        **{package: version(package) for package in PACKAGES},
    }


def data_file(name: str) -> Path:
    """A file of ``data/``, which ships with the package.

    Raises:
        HysteresisError: a file that is not there.
    """
    package = Path(str(files("tl_hysteresis")))
    for folder in (package / "_data", package.parent / "data"):
        if (folder / name).is_file():
            return folder / name
    raise HysteresisError(f"the package's data has no {name}")


def write_file(path: Path | str, content: str | bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        HysteresisError: a place that cannot be written.
    """
    _write(Path(path), content.encode() if isinstance(content, str) else content)


def _write(path: Path, data: bytes) -> None:
    """Write to a temporary name, flush to the disk, and rename: whole or not at all."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _removed_on_failure(temporary):
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError as error:
        raise HysteresisError(
            f"cannot write {path}: {error.strerror}; files written before are untouched"
        ) from None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _refuse_what_is_there(path: Path, config: StudyConfig) -> None:
    """Let pass a new path, an empty folder, and what a run left that was killed as it began."""
    if path.is_dir() and (path / MANIFEST).exists():
        same = (path / CONFIG).is_file() and _read(path / CONFIG) == config.to_json().encode()
        hint = f"continue it with `tl-hysteresis resume {quote(str(path))}`, or choose"
        raise HysteresisError(
            f"{path} holds a run already: {hint if same else 'one of other settings; choose'} "
            "another folder"
        )
    if not path.exists():
        return
    left = {path / CONFIG, path / LOCK, _temporary(path / CONFIG), _temporary(path / MANIFEST)}
    empty = path.is_dir() and left.issuperset(path.iterdir())
    if empty and (path / CONFIG).exists():
        empty = _read(path / CONFIG) == config.to_json().encode()
    if not empty:
        raise HysteresisError(f"{path} exists and is not an empty folder: choose another one")


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise HysteresisError(f"cannot read {path}: {error.strerror}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_read(path))
    except ValueError as error:
        raise HysteresisError(f"{path} is damaged: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise HysteresisError(f"{path} is damaged: not a JSON object")
    return data


def _tensors(data: bytes, name: str) -> dict[str, Tensor]:
    try:
        return load_safetensors(data)
    except SafetensorError as error:
        raise HysteresisError(f"{name} is not a safetensors file: {error}") from None


def _labels(data: bytes) -> dict[str, str]:
    """The metadata in a safetensors file's header: its length in 8 bytes, then JSON."""
    length = int.from_bytes(data[:8], "little")
    labels: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return labels


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _source_hash() -> str:
    """SHA-256 of this package's modules, so that a changed program is not taken for the same."""
    modules = sorted(Path(str(files("tl_hysteresis"))).glob("*.py"))
    return _sha256(b"".join(module.read_bytes() for module in modules))
