"""Grids: which cells there are, in which order, what is refused; and which cells share anchors."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers import results_in, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.grid import Grid
from tl_hysteresis.store import RunFolder
from tl_hysteresis.study import ANCHOR_FILES, run_study, train_anchors

CUSTOM = {"name": "custom", "factory": "own_task:FirstToken", "parameters": {"rare": 0.5}}


class TestCells:
    @given(
        dwells=st.lists(st.integers(1, 1000), min_size=1, max_size=4, unique=True),
        deltas=st.lists(st.floats(0, 0.5, exclude_min=True), min_size=1, max_size=3, unique=True),
    )
    def test_are_every_combination_the_last_axis_moving_fastest(
        self, dwells: list[int], deltas: list[float]
    ) -> None:
        grid = Grid.of({"seeds": [7]}, {"schedule.dwell": dwells, "schedule.delta": deltas})
        found = [(cell.config.schedule.dwell, cell.config.schedule.delta) for cell in grid.cells]
        assert found == list(product(dwells, deltas))
        assert [tuple(cell.values.values()) for cell in grid.cells] == found
        assert all(cell.config.seeds == (7,) for cell in grid.cells)
        assert len({cell.name for cell in grid.cells}) == len(grid.cells)
        again = Grid.from_json(grid.to_json())
        assert again == grid

    def test_override_a_setting_and_leave_its_neighbours(self) -> None:
        base = {"schedule": {"dwell": 9, "delta": 0.1}, "task": CUSTOM}
        axes: dict[str, list[Any]] = {"schedule.dwell": [2, 4], "task.parameters.rare": [0.1]}
        for cell, dwell in zip(Grid.of(base, axes).cells, (2, 4), strict=True):
            assert cell.config == StudyConfig.from_dict(
                {
                    "schedule": {"dwell": dwell, "delta": 0.1},
                    "task": CUSTOM | {"parameters": {"rare": 0.1}},
                }
            )
        assert base["schedule"] == {"dwell": 9, "delta": 0.1}
        assert CUSTOM["parameters"] == {"rare": 0.5}

    def test_take_whole_tables_and_lists(self) -> None:
        optimizers = [{"name": "sgd"}, {"name": "adam", "beta1": 0.5}]
        axes: dict[str, list[Any]] = {"optimizer": optimizers, "seeds": [[0], (1, 2)]}
        grid = Grid.of({}, axes)
        assert [cell.config.optimizer.name for cell in grid.cells] == ["sgd", "sgd", "adam", "adam"]
        assert [cell.config.seeds for cell in grid.cells] == [(0,), (1, 2)] * 2
        assert grid.cells[0].values == {"optimizer": "sgd", "seeds": "[0]"}
        assert grid.cells[3].values["optimizer"] == '{"name": "adam", "beta1": 0.5}'
        assert Grid.from_json(grid.to_json()).cells[3].config == grid.cells[3].config

    def test_an_axis_can_vary_a_part_of_what_an_earlier_one_sets(self) -> None:
        axes: dict[str, list[Any]] = {"optimizer": [{"name": "sgd"}, {"name": "adam"}]}
        axes["optimizer.learning_rate"] = [0.1]
        cells = Grid.of({}, axes).cells
        assert [(c.config.optimizer.name, c.config.optimizer.learning_rate) for c in cells] == [
            ("sgd", 0.1),
            ("adam", 0.1),
        ]

    def test_a_base_can_be_settings(self) -> None:
        config, axes = tiny_config(), {"schedule.dwell": [1, 2]}
        for base in (config, json.loads(config.to_json())):
            cells = Grid.of(base, axes).cells
            assert [cell.config for cell in cells] == [
                tiny_config(schedule={"dwell": dwell}) for dwell in (1, 2)
            ]

    def test_are_named_by_their_settings(self) -> None:
        (cell,) = Grid.of({}, {"schedule.dwell": [3]}).cells
        (other,) = Grid.of({"schedule": {"dwell": 3}}, {"schedule.p0": [0.5]}).cells
        assert cell.name == other.name == cell.config.hash[:16]
        assert str(cell) == "schedule.dwell = 3"

    def test_from_toml(self, tmp_path: Path) -> None:
        text = """
            [base]
            seeds = [4]
            [base.schedule]
            delta = 0.25
            [axes]
            schedule.dwell = [2, 8]
        """
        expected = Grid.of({"seeds": [4], "schedule": {"delta": 0.25}}, {"schedule.dwell": [2, 8]})
        (tmp_path / "nested.toml").write_text(text)
        assert Grid.from_toml(tmp_path / "nested.toml") == expected
        text = text.replace("schedule.dwell", '"schedule.dwell"')
        (tmp_path / "grid.toml").write_text(f"\ufeff{text}", encoding="utf-8")
        assert Grid.from_toml(tmp_path / "grid.toml") == expected


@pytest.mark.usefixtures("unchecked")
class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"axes": {"schedule.dwel": [1]}}, "the cell schedule.dwel = 1: .*no such setting"),
            ({"axes": {"schedule..dwell": [1]}}, "the cell schedule..dwell = 1: .*no such setting"),
            ({"axes": {"dwell": [1]}}, "the cell dwell = 1: .*dwell = 1: there is no such setting"),
            ({"base": {"sched": {}}, "axes": {"quick": [True]}}, "sched: there is no such setting"),
            ({"axes": {"seeds.first": [1]}, "base": {"seeds": [0]}}, "seeds = .0. is a setting"),
            ({"axes": {"schedule.dwell": []}}, "the axis schedule.dwell is empty"),
            ({"axes": {"schedule.dwell": 3}}, "the axis schedule.dwell = 3 must be a list"),
            ({"axes": {"device": "cpu"}}, "the axis device = 'cpu' must be a list"),
            ({"axes": {"optimizer": {"name": "sgd"}}}, "optimizer.name = 'sgd' must be a list"),
            ({"axes": {"schedule.dwell": [1, 0]}}, "the cell schedule.dwell = 0: .*greater than"),
            (
                {"axes": {"schedule.p0": [0.5, 0.9], "schedule.delta": [0.1, 0.2]}},
                "the cell schedule.p0 = 0.9, schedule.delta = 0.2: .*a mixture is a probability",
            ),
            (
                {"axes": {"schedule.dwell": [1, 2, 1]}},
                "the cells schedule.dwell = 1 and schedule.dwell = 1 have the same settings",
            ),
            ({"axes": {}}, "at least one axis"),
            ({}, "at least one axis"),
            ({"axis": {}}, "no key 'axis'; it has base and axes"),
            ({"base": 3}, "base = 3 must be a table"),
            ({"axes": [1]}, r"axes = \[1\] must be a table"),
        ],
    )
    def test_say_what_and_where(self, data: dict[str, Any], message: str) -> None:
        with pytest.raises(HysteresisError, match=message):
            Grid.from_dict(data)

    def test_of_files_name_them(self, tmp_path: Path) -> None:
        path = tmp_path / "grid.toml"
        with pytest.raises(HysteresisError, match="cannot read the grid .*grid.toml"):
            Grid.from_toml(path)
        path.write_text("base = ")
        with pytest.raises(HysteresisError, match="grid.toml: not TOML"):
            Grid.from_toml(path)
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(HysteresisError, match="cannot read the grid"):
            Grid.from_toml(path)
        path.write_text("[axes]\ndevice = []")
        with pytest.raises(HysteresisError, match="grid.toml: the axis device is empty"):
            Grid.from_toml(path)

    @pytest.mark.parametrize("text", ["", "[]", "3", '{"axes"'])
    def test_of_json_that_is_no_grid(self, text: str) -> None:
        with pytest.raises(HysteresisError, match="not JSON|a JSON object"):
            Grid.from_json(text)


class TestAnchorsShared:
    @pytest.mark.parametrize(
        "change",
        [
            {"schedule": {"dwell": 3}},
            {"schedule": {"delta": 0.3}},
            {"schedule": {"steps": 8}},
            {"schedule": {"shape": "smooth"}},
            {"schedule": {"same_order": True}},
            {"schedule": {"parameter": "learning_rate", "delta": 1e-4}},
            {"schedule": {"parameter": "label_noise", "delta": 0.1, "label_noise": 0.1}},
            {"relaxation": {"measure_at": [0, 7]}},
            {"measurement": {"circuits": False}},
            {"measurement": {"patching_trials": 4}},
            {"memory": {"shuffled": 3}},
            {"anchor": {"require_convergence": True}},
            {"quick": True},
        ],
    )
    def test_by_what_comes_after_them(self, change: dict[str, Any]) -> None:
        noise = change.get("schedule", {}).get("label_noise", 0.0)
        base = tiny_config(schedule={"label_noise": noise})
        assert tiny_config(**change) != base
        assert tiny_config(**change).of_anchors() == base.of_anchors()

    @pytest.mark.parametrize(
        "change",
        [
            {"seeds": [0]},
            {"seeds": [1, 0]},
            {"threads": 2},
            {"task": {"n_pairs": 4}},
            {"model": {"d_mlp": 8}},
            {"optimizer": {"learning_rate": 2e-3}},
            {"optimizer": {"name": "adam"}},
            {"optimizer": {"batch_size": 4}},
            {"anchor": {"updates": 16}},
            {"anchor": {"excess_loss": 1.0}},
            {"schedule": {"p0": 0.4}},
            {"schedule": {"labels": "independent"}},
            {"schedule": {"label_noise": 0.1}},
            {"measurement": {"conflict_trials": 32}},
        ],
    )
    def test_not_by_what_trains_or_judges_them(self, change: dict[str, Any]) -> None:
        assert tiny_config(**change).of_anchors() != tiny_config().of_anchors()

    def test_of_anchors_changes_itself_no_more(self) -> None:
        config = tiny_config().of_anchors()
        assert config.of_anchors() == config


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of a dwell of 2."""
    return run_study(tiny_config(), tmp_path_factory.mktemp("donor") / "run").folder.path


# Whatever of_anchors leaves out of account, changed at once.
OTHER = tiny_config(
    schedule={"parameter": "learning_rate", "delta": 5e-4, "dwell": 1, "steps": 8},
    relaxation={"measure_at": [0, 2]},
    measurement={"circuits": False},
)


class TestAnchorsTakenOver:
    def test_are_those_that_the_study_would_train(self, donor: Path, tmp_path: Path) -> None:
        assert OTHER.of_anchors() == tiny_config().of_anchors()
        alone = run_study(OTHER, tmp_path / "alone").folder.path
        taken = run_study(OTHER, tmp_path / "taken", anchors=donor).folder.path
        assert results_in(taken) == results_in(alone)
        assert "course" not in json.loads((taken / "timings.json").read_text())
        train_anchors(OTHER, tmp_path / "anchors")
        for name in ANCHOR_FILES:
            assert (donor / name).read_bytes() == (alone / name).read_bytes()
            assert (donor / name).read_bytes() == (tmp_path / "anchors" / name).read_bytes()

    def test_train_anchors_goes_on_and_leaves_nothing(self, tmp_path: Path) -> None:
        train_anchors(OTHER, tmp_path / "anchors")
        before = results_in(tmp_path / "anchors")
        assert {name for name in before if "/" in name} == set(ANCHOR_FILES)
        assert "progress.safetensors" not in before
        train_anchors(tiny_config(), tmp_path / "anchors")
        assert results_in(tmp_path / "anchors") == before
        with pytest.raises(HysteresisError, match="holds a run already"):
            train_anchors(tiny_config(seeds=[5]), tmp_path / "anchors")

    def test_a_study_judges_their_convergence(self, tmp_path: Path) -> None:
        strict = tiny_config(anchor={"require_convergence": True})
        train_anchors(strict, tmp_path / "anchors")
        with pytest.raises(HysteresisError, match=f"not converged.*resume {tmp_path / 'run'}"):
            run_study(strict, tmp_path / "run", anchors=tmp_path / "anchors")

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"seeds": [0]}, "seeds"),
            (
                {"optimizer": {"learning_rate": 1e-2}, "schedule": {"p0": 0.4}},
                "optimizer, schedule",
            ),
        ],
    )
    def test_are_not_of_other_settings(
        self, donor: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(HysteresisError, match=f"are of other settings: {named}$"):
            run_study(tiny_config(**change), tmp_path / "run", anchors=donor)
        assert not (tmp_path / "run").exists()

    def test_are_not_of_other_versions(self, donor: Path, tmp_path: Path) -> None:
        manifest = donor / "manifest.json"
        before = manifest.read_text()
        data = json.loads(before)
        manifest.write_text(json.dumps(data | {"versions": data["versions"] | {"torch": "0.1"}}))
        try:
            with pytest.raises(HysteresisError, match="begun with torch 0.1"):
                run_study(OTHER, tmp_path / "run", anchors=donor)
        finally:
            manifest.write_text(before)
        assert not (tmp_path / "run").exists()

    def test_are_there_and_whole(self, donor: Path, tmp_path: Path) -> None:
        with pytest.raises(HysteresisError, match="not a run folder"):
            run_study(OTHER, tmp_path / "run", anchors=tmp_path)
        RunFolder.create(tmp_path / "empty", OTHER, threads=1)
        with pytest.raises(HysteresisError, match="has no tables/course.csv"):
            run_study(OTHER, tmp_path / "run", anchors=tmp_path / "empty")
