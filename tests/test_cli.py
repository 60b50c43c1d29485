"""The command line: what it prints, its exit codes, and that bad input leaves nothing behind."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import command, files_in, results_in, tiny_config
from safetensors.torch import save

from tl_hysteresis.config import ScheduleConfig, StudyConfig
from tl_hysteresis.store import RunFolder

CONFIG = tiny_config(model={"n_layers": 1}, relaxation={"measure_at": [0, 1]})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the command line made; not to be changed."""
    home = tmp_path_factory.mktemp("finished")
    (home / "study.toml").write_text(CONFIG.to_toml())
    answer = command("run", home / "study.toml", "--out", home / "run")
    assert answer.code == 0, answer.err
    return home / "run"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*arguments: object) -> str:
    """The one line with which a command refuses; it has written nothing."""
    before = files_in(Path())
    answer = command(*arguments)
    assert files_in(Path()) == before
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert answer.err.endswith("\n")
    return answer.err.removeprefix("error: ").rstrip("\n")


BAD_FILES = [
    ("speed = 3", "bad settings: speed = 3: there is no such setting"),
    ("[task]\nn_key = 3", "bad settings: task.n_key = 3: there is no such setting"),
    ("seeds = '0'", "bad settings: seeds = '0': Input should be a valid tuple"),
    ("[anchor]\nupdates = 1.5", "anchor.updates = 1.5: Input should be a valid integer"),
    ("[schedule]\ndelta = 0.6", "schedule: delta = 0.6 around p0 = 0.5 gives"),
    (
        "[schedule]\np0 = 0.9",
        "schedule: delta = 0.2 around p0 = 0.9 gives mixtures from 0.7 to 1.1: "
        "a mixture is a probability, in [0, 1]",
    ),
    (
        "[task]\nn_keys = 4\nn_pairs = 5",
        "task: n_pairs = 5 exceeds n_keys = 4: the keys of a prompt are distinct",
    ),
    ("seeds = []", "seeds = []: a study needs at least one seed"),
    ("seeds = [1, 1]", "seeds = [1, 1]: a seed that stands twice is no replicate"),
    (
        "[model]\nn_heads = 3",
        "model: n_heads = 3 does not divide d_model = 64: set d_head explicitly",
    ),
    ("device = 'tpu'", "device = 'tpu': String should match pattern"),
    ("seeds: [0]", "not TOML: "),
    ("{}", "not TOML: "),
]


class TestRunRefuses:
    @pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=[text for text, _ in BAD_FILES])
    def test_a_bad_config(self, here: Path, text: str, message: str) -> None:
        Path("bad.toml").write_text(text)
        line = refused("run", "bad.toml")
        assert line.startswith("bad.toml: ")
        assert message in line

    def test_a_config_that_cannot_be_read(self, here: Path) -> None:
        line = refused("run", "nowhere.toml")
        assert line.startswith("cannot read the config nowhere.toml: ")
        assert "No such file" in line
        assert "Is a directory" in refused("run", here)
        Path("bad.toml").write_bytes(b"\xff")
        assert refused("run", "bad.toml").startswith("cannot read the config bad.toml: 'utf-8'")

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--seeds", "0", "--seeds", "0"], "seeds = [0, 0]: a seed that stands twice"),
            (["--seeds", "-1"], "seeds.0 = -1: Input should be greater than or equal to 0"),
            (["--threads", "0"], "threads = 0: Input should be greater than or equal to 1"),
            (["--device", "abacus"], "device = 'abacus': String should match pattern"),
        ],
    )
    def test_a_bad_flag(self, here: Path, flags: list[str], message: str) -> None:
        Path("study.toml").write_text(CONFIG.to_toml())
        assert refused("run", "study.toml", *flags).startswith(f"bad settings: {message}")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
    @pytest.mark.parametrize("device", ["cuda", "cuda:0"])
    def test_a_device_that_is_not_there(self, here: Path, device: str) -> None:
        Path("study.toml").write_text(CONFIG.to_toml())
        line = refused("run", "study.toml", "--device", device)
        assert line.startswith(f"device = '{device}' cannot be used: ")

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="here is no GPU")
    def test_a_gpu_too_many(self, here: Path) -> None:
        Path("study.toml").write_text(CONFIG.to_toml())
        line = refused("run", "study.toml", "--device", "cuda:99")
        assert line.startswith("device = 'cuda:99' cannot be used: ")

    def test_an_output_that_exists(self, here: Path, finished: Path) -> None:
        Path("study.toml").write_text(CONFIG.to_toml())
        shutil.copytree(finished, "runs/study")
        Path("mine").mkdir()
        Path("mine/notes.txt").touch()
        run = "runs/study holds a run already: continue it with `tl-hysteresis resume runs/study`"
        assert refused("run", "study.toml").startswith(run)
        for out in ("mine", "study.toml"):
            line = refused("run", "study.toml", "--out", out)
            assert line == f"{out} exists and is not an empty folder: choose another one"
        line = refused("run", "study.toml", "--out", "study.toml/run")
        assert line.startswith("cannot make the folder study.toml/run: ")

    @pytest.mark.parametrize(
        "arguments",
        [["run"], ["run", "a", "b"], ["run", "a", "--seeds", "x"], ["fly"], ["show"], ["--fast"]],
    )
    def test_wrong_usage(self, here: Path, arguments: list[str]) -> None:
        answer = command(*arguments)
        assert answer.code == 2
        assert "Usage:" in answer.err
        assert files_in(here) == {}


def another_config(run: Path) -> None:
    (run / "config.json").write_text(tiny_config(seeds=[8, 9]).to_json())


def damaged_checkpoint(run: Path) -> None:
    path = run / "checkpoints" / "anchor.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def foreign_checkpoint(run: Path) -> None:
    path = run / "checkpoints" / "anchor.safetensors"
    path.write_bytes(save({"parameters": torch.zeros(2)}))


def foreign_table(run: Path) -> None:
    (run / "tables" / "loop.csv").write_text("seed,margin\n0,1.0\n")


def missing_table(run: Path) -> None:
    (run / "tables" / "routes.csv").unlink()


def damaged_manifest(run: Path) -> None:
    (run / "manifest.json").write_text('{"format": 1, ')


def another_format(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"format": 0}))


class TestResumeAndShowRefuse:
    @pytest.mark.parametrize("name", ["resume", "show"])
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (another_config, "run/config.json is not the config that this run began with"),
            (damaged_checkpoint, "run/checkpoints/anchor.safetensors is damaged, or not this"),
            (foreign_checkpoint, "run/checkpoints/anchor.safetensors is damaged, or not this"),
            (foreign_table, "run/tables/loop.csv is damaged, or not this run's"),
            (missing_table, "cannot read run/tables/routes.csv: No such file"),
            (damaged_manifest, "run/manifest.json is damaged: not JSON"),
            (another_format, "run is a run folder of format 0; this version reads format 1"),
        ],
    )
    def test_a_damaged_run(
        self,
        here: Path,
        finished: Path,
        name: str,
        damage: Callable[[Path], None],
        message: str,
    ) -> None:
        shutil.copytree(finished, "run")
        damage(Path("run"))
        assert refused(name, "run").startswith(message)

    @pytest.mark.parametrize("name", ["resume", "show"])
    def test_what_is_not_a_run(self, here: Path, name: str) -> None:
        Path("file").touch()
        for place in ("nowhere", ".", "file"):
            line = refused(name, place)
            assert line == f"{place} is not a run folder: it has no config.json"

    def test_showing_what_is_not_there_yet(self, here: Path) -> None:
        RunFolder.create("run", CONFIG, threads=1)
        line = refused("show", "run")
        assert line == "the run run has no tables/anchors.csv (the run is not complete)"

    def test_resuming_with_other_versions(self, here: Path) -> None:
        run = RunFolder.create("run", CONFIG, threads=1)
        run.note(versions=run.manifest["versions"] | {"torch": "1.0"})
        assert "was begun with torch 1.0, here is" in refused("resume", "run")


class TestInit:
    def test_writes_every_default(self, here: Path) -> None:
        answer = command("init")
        assert (answer.code, answer.err) == (0, "")
        assert answer.out == "wrote study.toml; run it with: tl-hysteresis run study.toml\n"
        assert files_in(here).keys() == {"study.toml"}
        assert StudyConfig.from_toml("study.toml") == StudyConfig()

    def test_refuses_what_exists(self, here: Path) -> None:
        Path("study.toml").write_text("mine")
        assert refused("init") == "study.toml exists: choose another name"
        assert refused("init", here) == f"{here} exists: choose another name"
        assert refused("init", "study.toml/x").startswith("cannot write study.toml/x: ")

    def test_run_takes_what_it_wrote(self, here: Path) -> None:
        assert command("init", "folder/mine.toml").code == 0
        path = Path("folder/mine.toml")
        text = path.read_text()
        # Only the sizes, so that it takes a second.
        for name, size in {
            "n_keys": "6",
            "n_values": "8",
            "n_pairs": "3",
            "n_layers": "1",
            "d_model": "16",
            "d_mlp": "16",
            "batch_size": "8",
            "updates": "4",
            "evaluate_every": "2",
            "steps": "4",
            "dwell": "1",
            "measure_at": "[0, 1]",
            "conflict_trials": "16",
            "patching_trials": "8",
            "require_convergence": "false",
        }.items():
            text, found = re.subn(rf"(?m)^{name} = .*$", f"{name} = {size}", text)
            assert found == 1
        path.write_text(text)
        answer = command("run", path, "--seeds", 3, "--seeds", 1, "--threads", 1)
        assert answer.code == 0, answer.err
        run = RunFolder.open("runs/mine")
        assert run.complete
        assert run.config.seeds == (3, 1)
        assert run.manifest["threads"] == 1
        assert run.config.schedule == ScheduleConfig(steps=4, dwell=1)


class TestRun:
    def test_writes_and_prints_the_study(self, finished: Path) -> None:
        run = RunFolder.open(finished)
        assert run.complete
        assert run.config == CONFIG
        run.verify()

    def test_show_prints_the_tables_and_warnings(self, finished: Path) -> None:
        before = files_in(finished)
        answer = command("show", finished)
        assert (answer.code, answer.err) == (0, "")
        for title in ("Anchors", "Gap in margin", "Mean replacement", "Routes", "Beside the paper"):
            assert re.search(rf"(?m)^{title}", answer.out)
        assert "warning: the anchors of seeds [0, 1] have not converged" in answer.out
        assert "warning: with 2 seeds no sign-flip p can be below 0.5" in answer.out
        assert "quick" not in answer.out
        assert f"tables and checkpoints: {finished}" in answer.out
        assert files_in(finished) == before

    def test_resuming_a_complete_run_shows_it(self, finished: Path) -> None:
        before = files_in(finished)
        assert command("resume", finished) == command("show", finished)
        assert files_in(finished) == before

    def test_unconverged_anchors_stop_it_unless_accepted(self, here: Path) -> None:
        config = tiny_config(
            model={"n_layers": 1},
            relaxation={"measure_at": [1]},
            anchor={"require_convergence": True},
        )
        Path("study.toml").write_text(config.to_toml())
        for arguments in (("run", "study.toml", "--out", "run"), ("resume", "run")):
            answer = command(*arguments)
            line = answer.err.splitlines()[-1]
            assert answer.code == 2
            assert line.startswith("error: anchors that have not converged (seed 0: excess loss ")
            assert line.endswith("tl-hysteresis resume run --accept-unconverged")
            assert not RunFolder.open("run").has("tables/loop.csv")
        assert command("resume", "run", "--accept-unconverged").code == 0
        assert RunFolder.open("run").manifest["accepted_unconverged"]
        assert "seeds [0, 1] have not converged" in command("show", "run").out

    def test_quick_is_marked_wherever_numbers_show(self, here: Path) -> None:
        config = tiny_config(seeds=[0, 1, 2], model={"n_layers": 1}, relaxation={"measure_at": [1]})
        Path("study.toml").write_text(config.to_toml())
        answer = command("run", "study.toml", "--quick", "--out", "run")
        assert answer.code == 0, answer.err
        assert "warning: a quick run: " in answer.out
        assert "warning: a quick run: " in command("show", "run").out
        assert json.loads(Path("run/config.json").read_text())["quick"] is True
        assert RunFolder.open("run").config == config.as_quick()


class TestReproduce:
    @pytest.fixture(autouse=True)
    def tiny_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tl_hysteresis.config.StudyConfig", lambda: CONFIG)

    def test_runs_then_shows_and_refuses_another_config(self, here: Path, finished: Path) -> None:
        answer = command("reproduce")
        assert answer.code == 0, answer.err
        assert "Beside the paper" in answer.out
        assert results_in(Path("runs/reproduce")) == results_in(finished)
        again = command("reproduce")
        assert again.code == 0
        assert again.out == f"continuing runs/reproduce\n{answer.out}"
        line = refused("reproduce", "--seeds", 5)
        assert line.startswith("runs/reproduce holds a run already: ")

    def test_continues_what_was_stopped(self, here: Path, finished: Path) -> None:
        RunFolder.create("run", CONFIG, threads=1)
        answer = command("reproduce", "--out", "run")
        assert answer.code == 0, answer.err
        assert answer.out.startswith("continuing run\n")
        assert results_in(Path("run")) == results_in(finished)

    def test_quick_has_a_folder_of_its_own(self, here: Path) -> None:
        assert command("reproduce", "--quick").code == 0
        assert RunFolder.open("runs/reproduce-quick").config == CONFIG.as_quick()


class TestInAProcess:
    def test_help_loads_neither_torch_nor_transformer_lens(self, here: Path) -> None:
        program = (
            "import sys\n"
            "from tl_hysteresis.cli import main\n"
            "sys.argv = ['tl-hysteresis', '--help']\n"
            "try:\n"
            "    main()\n"
            "finally:\n"
            "    heavy = {'torch', 'transformer_lens', 'pandas', 'scipy'} & sys.modules.keys()\n"
            "    print('heavy:', sorted(heavy))\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        for name in ("reproduce", "run", "resume", "show", "init"):
            assert name in done.stdout
        assert done.stdout.endswith("heavy: []\n")

    def test_an_error_is_one_line_on_stderr_and_exit_code_2(self, here: Path) -> None:
        Path("bad.toml").write_text("seeds = []")
        module = [sys.executable, "-m", "tl_hysteresis"]
        done = subprocess.run([*module, "run", "bad.toml"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        message = "bad.toml: bad settings: seeds = []: a study needs at least one seed"
        assert done.stderr == f"error: {message}\n"
        assert files_in(here).keys() == {"bad.toml"}
