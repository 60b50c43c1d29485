"""A run that is stopped at any moment, in any way, ends as it would have: the same bytes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import files_in, results_in, tiny_config
from interruptions import MOMENTS, Moment, Stop, run_command, writes_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")

# With all that resuming has to do with, and no more: each trial below runs it.
CONFIG = tiny_config(model={"n_layers": 1}, relaxation={"measure_at": [0, 4]})


def log_of(folder: Path) -> Path:
    """What the last process that worked on a folder printed, in a file beside it."""
    return folder.with_name(f"{folder.name}.log")


class Study:
    """A config file, and runs of it in processes that can be stopped."""

    def __init__(self, home: Path) -> None:
        self.home, self.config = home, home / "study.toml"
        self.config.write_text(CONFIG.to_toml())

    def run(self, folder: Path, stop: Stop | None = None, *, config: Path | None = None) -> int:
        arguments = ("run", config or self.config, "--out", folder)
        return run_command(*arguments, log=log_of(folder), stop=stop)

    def resume(self, folder: Path, stop: Stop | None = None) -> int:
        return run_command("resume", folder, log=log_of(folder), stop=stop)

    def go_on(self, folder: Path, stop: Stop | None = None) -> int:
        """Resume, or start again what was stopped before its manifest was written."""
        return (self.resume if (folder / "manifest.json").exists() else self.run)(folder, stop)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return Study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def uninterrupted(study: Study) -> Path:
    folder = study.home / "uninterrupted"
    assert study.run(folder) == 0, log_of(folder).read_text()
    return folder


@pytest.fixture(scope="module")
def writes(uninterrupted: Path) -> list[str]:
    """The file of each write of an uninterrupted run."""
    return writes_of(log_of(uninterrupted))


@pytest.fixture(scope="module")
def expected(uninterrupted: Path) -> dict[str, bytes]:
    return results_in(uninterrupted)


def killed(exit_code: int) -> bool:
    return exit_code == -signal.SIGKILL


class TestKilled:
    def test_at_every_write(
        self, study: Study, writes: list[str], expected: dict[str, bytes]
    ) -> None:
        stops = {Stop(write, MOMENTS[write % 3]) for write in range(len(writes))}
        # Tables that grow are written anew while the manifest names the version before.
        growing = {"replacement.csv", "routes.csv"}
        stops |= {Stop(i, "renamed") for i, name in enumerate(writes) if name in growing}
        assert len(stops) >= 20
        assert {writes[stop.write] for stop in stops} == {
            *("config.json", "manifest.json", "timings.json", "progress.safetensors"),
            *("anchor.safetensors", "relaxation_0.safetensors"),
            *("relaxation_4.safetensors", "matching.csv"),
            *("course.csv", "anchors.csv", "loop.csv", "relaxation.csv"),
            *growing,
        }
        differing = []
        for stop in sorted(stops, key=lambda stop: (stop.write, stop.moment)):
            folder = study.home / f"killed-{stop.write}-{stop.moment}"
            assert killed(study.run(folder, stop)), stop
            left = list(folder.rglob(f".{writes[stop.write]}.tmp"))
            assert len(left) == (stop.moment != "renamed"), stop
            if study.go_on(folder) != 0 or results_in(folder) != expected:
                differing.append((stop, writes[stop.write], log_of(folder).read_text()))
        assert not differing

    @pytest.mark.parametrize("first", [3, 16, 30])
    @pytest.mark.parametrize("second", [Stop(0, "half"), Stop(1, "renamed")])
    def test_again_while_resuming(
        self, study: Study, expected: dict[str, bytes], first: int, second: Stop
    ) -> None:
        folder = study.home / f"twice-{first}-{second.moment}"
        assert killed(study.run(folder, Stop(first, "whole")))
        assert killed(study.resume(folder, second))
        assert study.resume(folder) == 0, log_of(folder).read_text()
        assert results_in(folder) == expected

    def test_after_every_few_writes(self, study: Study, expected: dict[str, bytes]) -> None:
        folder, processes = study.home / "again-and-again", 1
        while killed(exit_code := study.go_on(folder, Stop(7, "half"))):
            processes += 1
            assert processes < 30, "no headway"
        assert exit_code == 0, log_of(folder).read_text()
        assert processes >= 5
        assert results_in(folder) == expected


class TestStopped:
    @pytest.mark.parametrize(
        ("file", "moment"),
        [
            ("progress.safetensors", "half"),
            ("loop.csv", "whole"),
            ("relaxation_4.safetensors", "renamed"),
            ("routes.csv", "renamed"),
        ],
    )
    def test_by_ctrl_c(
        self,
        study: Study,
        writes: list[str],
        expected: dict[str, bytes],
        file: str,
        moment: Moment,
    ) -> None:
        folder = study.home / f"ctrl-c-{file}"
        assert study.run(folder, Stop(writes.index(file), moment, "SIGINT")) == 130
        assert log_of(folder).read_text().splitlines()[-1] == (
            f"stopped; go on with: tl-hysteresis resume {folder}"
        )
        assert not list(folder.rglob("*.tmp"))
        assert study.resume(folder) == 0, log_of(folder).read_text()
        assert results_in(folder) == expected

    def test_by_ctrl_c_before_there_is_a_run(self, study: Study) -> None:
        folder = study.home / "ctrl-c-at-once"
        assert study.run(folder, Stop(0, "half", "SIGINT")) == 130
        assert log_of(folder).read_text().splitlines() == ["", "stopped before the run began"]
        assert files_in(folder) == {}

    @pytest.mark.parametrize(
        ("file", "moment"),
        [
            ("manifest.json", "half"),
            ("progress.safetensors", "half"),
            ("anchor.safetensors", "whole"),
            ("course.csv", "half"),
            ("timings.json", "half"),
        ],
    )
    def test_by_a_disk_that_seems_full(
        self,
        study: Study,
        writes: list[str],
        expected: dict[str, bytes],
        file: str,
        moment: Moment,
    ) -> None:
        folder = study.home / f"full-{file}-{moment}"
        assert study.run(folder, Stop(writes.index(file), moment, "full")) == 2
        line = log_of(folder).read_text().splitlines()[-1]
        (path,) = {name for name in [*expected, "progress.safetensors"] if Path(name).name == file}
        assert line == (
            f"error: cannot write {folder / path}: No space left on device; "
            "files written before are untouched"
        )
        assert not list(folder.rglob("*.tmp"))
        finished = {name: data for name, data in results_in(folder).items() if ".csv" in name}
        assert finished.items() <= expected.items()
        assert study.go_on(folder) == 0, log_of(folder).read_text()
        assert results_in(folder) == expected

    def test_by_a_disk_that_is_full(self, study: Study, expected: dict[str, bytes]) -> None:
        folder = study.home / "small-disk"
        folder.mkdir()
        size = sum(map(len, expected.values()))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size // 2}", "tmpfs", str(folder)]
        if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a small disk is not permitted here")
        try:
            assert study.run(folder) == 2
            assert "No space left on device" in log_of(folder).read_text()
            assert not list(folder.rglob("*.tmp"))
            grow = ["mount", "-o", f"remount,size={4 * size}", str(folder)]
            subprocess.run(grow, check=True, capture_output=True)
            assert study.resume(folder) == 0, log_of(folder).read_text()
            assert results_in(folder) == expected
        finally:
            subprocess.run(["umount", str(folder)], check=True)


def test_the_same_config_gives_the_same_bytes(study: Study, expected: dict[str, bytes]) -> None:
    assert study.run(study.home / "second") == 0
    assert results_in(study.home / "second") == expected


@pytest.mark.parametrize("every", [1, 1000])
def test_how_often_states_are_saved_changes_no_result(
    study: Study, expected: dict[str, bytes], every: int
) -> None:
    config = study.home / f"every-{every}.toml"
    config.write_text(CONFIG.model_copy(update={"checkpoint_every": every}).to_toml())
    whole, cut = study.home / f"every-{every}", study.home / f"every-{every}-cut"
    assert study.run(whole, config=config) == 0
    # The first write of the loop: if states are saved more often than it is observed, before the
    # first observation.
    stop = Stop(writes_of(log_of(whole)).index("anchors.csv") + 2, "renamed")
    assert killed(study.run(cut, stop, config=config))
    assert study.resume(cut) == 0, log_of(cut).read_text()
    results = results_in(whole)
    assert results_in(cut) == results
    assert {name for name in expected if results[name] != expected[name]} == {
        "config.json",
        "manifest.json",
    }


def test_a_complete_run_is_left_as_it_is(
    study: Study, writes: list[str], uninterrupted: Path
) -> None:
    assert writes  # read before the log is written anew

    def state() -> dict[Path, tuple[int, bytes]]:
        files = [
            path for path in uninterrupted.rglob("*") if path.is_file() and path.name != ".lock"
        ]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    assert study.resume(uninterrupted) == 0
    assert writes_of(log_of(uninterrupted)) == []
    assert state() == before
