"""Settings: what is written reads back, what is wrong is refused by name, value and rule."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tl_hysteresis.config import (
    AdamConfig,
    AdamWConfig,
    AnchorConfig,
    AssociativeRecallConfig,
    MeasurementConfig,
    ModelConfig,
    OptimizerConfig,
    RelaxationConfig,
    ScheduleConfig,
    SentenceRecallConfig,
    Settings,
    SGDConfig,
    StudyConfig,
    TaskConfig,
)
from tl_hysteresis.errors import HysteresisError

counts = st.integers(1, 10**8)
naturals = st.integers(0, 2**63 - 1)
probabilities = st.floats(0, 1)
positives = st.floats(0, exclude_min=True, allow_infinity=False)
decays = st.floats(0, 1, exclude_max=True)


@st.composite
def tasks(draw: st.DrawFn) -> TaskConfig:
    n_keys = draw(st.integers(3, 200))
    n_pairs = draw(st.integers(2, n_keys - 1))
    n_values = draw(st.integers(max(n_keys, n_pairs + 2), 300))
    if draw(st.booleans()):
        return SentenceRecallConfig(
            n_names=n_keys,
            n_places=n_values,
            max_facts=n_pairs,
            min_fillers=draw(counts),
            filler_rate=draw(st.floats(0, 1, exclude_max=True)),
        )
    return AssociativeRecallConfig(n_keys=n_keys, n_values=n_values, n_pairs=n_pairs)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    n_heads, d_head = draw(st.integers(1, 12)), draw(st.integers(1, 64).map(lambda n: 2 * n))
    return ModelConfig(
        n_layers=draw(counts),
        n_heads=n_heads,
        d_model=n_heads * d_head,
        d_head=draw(st.sampled_from([None, d_head, 2 * d_head])),
        d_mlp=draw(counts),
        attn_only=draw(st.booleans()),
        act_fn=draw(st.sampled_from(["relu", "gelu", "gelu_new", "silu"])),
        normalization_type=draw(st.sampled_from(["LN", "LNPre", "RMS", "RMSPre", "none"])),
        positional_embedding_type=draw(st.sampled_from(["standard", "rotary", "shortformer"])),
    )


@st.composite
def optimizers(draw: st.DrawFn) -> OptimizerConfig:
    shared: dict[str, Any] = {
        "learning_rate": draw(positives),
        "weight_decay": draw(st.floats(0, allow_infinity=False)),
        "batch_size": draw(counts),
    }
    if draw(st.booleans()):
        return SGDConfig(**shared, momentum=draw(decays))
    shared |= {"beta1": draw(decays), "beta2": draw(decays), "eps": draw(positives)}
    return AdamConfig(**shared) if draw(st.booleans()) else AdamWConfig(**shared)


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleConfig:
    p0 = draw(st.floats(0.01, 0.99))
    return ScheduleConfig(
        shape=draw(st.sampled_from(["staircase", "smooth"])),
        p0=p0,
        delta=draw(st.floats(0.001, 0.999)) * min(p0, 1 - p0),
        steps=draw(st.integers(1, 100).map(lambda n: 4 * n)),
        dwell=draw(counts),
    )


@st.composite
def studies(draw: st.DrawFn) -> StudyConfig:
    conflict_trials = draw(st.integers(2, 10**6))
    every = draw(st.integers(1, 10**6))
    return StudyConfig(
        seeds=tuple(draw(st.lists(naturals, min_size=1, max_size=8, unique=True))),
        device=draw(st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:13"])),
        threads=draw(st.none() | st.integers(1, 1024)),
        checkpoint_every=draw(counts),
        quick=draw(st.booleans()),
        task=draw(tasks()),
        model=draw(models()),
        optimizer=draw(optimizers()),
        anchor=AnchorConfig(
            updates=every * draw(st.integers(1, 50)),
            evaluate_every=every,
            excess_loss=draw(positives),
            answer_share=draw(probabilities),
            margin_drift=draw(positives),
            require_convergence=draw(st.booleans()),
        ),
        schedule=draw(schedules()),
        relaxation=RelaxationConfig(
            measure_at=tuple(
                sorted({draw(counts), *draw(st.lists(st.integers(0, 10**6), max_size=6))})
            )
        ),
        measurement=MeasurementConfig(
            conflict_trials=conflict_trials,
            patching_trials=draw(st.integers(2, conflict_trials)),
        ),
    )


class TestRoundTrip:
    @given(studies())
    @settings(deadline=None)
    def test_toml_and_json(self, config: StudyConfig) -> None:
        for again in (
            StudyConfig.from_toml_text(config.to_toml()),
            StudyConfig.from_json(config.to_json()),
            StudyConfig.from_dict(config.model_dump()),
        ):
            assert again == config
            assert again.hash == config.hash

    @given(studies())
    @settings(deadline=None)
    def test_quick_settings_are_valid_and_marked(self, config: StudyConfig) -> None:
        quick = config.as_quick()
        assert StudyConfig.from_dict(quick.model_dump()) == quick
        assert quick.quick
        assert quick.as_quick() == quick
        assert quick.seeds == config.seeds[:2]
        assert quick.anchor.updates <= config.anchor.updates
        assert quick.measurement.conflict_trials <= config.measurement.conflict_trials
        assert quick.measurement.patching_trials <= config.measurement.patching_trials

    def test_file(self, tmp_path: Path) -> None:
        path = tmp_path / "study.toml"
        path.write_text(tiny_config().to_toml())
        assert StudyConfig.from_toml(path) == StudyConfig.from_toml(str(path)) == tiny_config()

    def test_what_is_left_out_has_its_default(self) -> None:
        assert StudyConfig.from_toml_text("") == StudyConfig.from_json("{}") == StudyConfig()
        config = StudyConfig.from_toml_text("[optimizer]\nlearning_rate = 1")
        assert config == StudyConfig(optimizer=AdamWConfig(learning_rate=1.0))

    def test_toml_says_what_each_setting_means(self) -> None:
        text = StudyConfig().to_toml()
        for table in (StudyConfig(), *_tables(StudyConfig())):
            for name, field in type(table).model_fields.items():
                if not isinstance(getattr(table, name), Settings):
                    assert field.description, name
                    assert f"# {' '.join(field.description.split())}" in text


def _tables(config: StudyConfig) -> Iterator[Settings]:
    return (value for _, value in config if isinstance(value, Settings))


# Another valid value for every setting, and for every setting of the other optimizers.
OTHERS: dict[str, Any] = {
    "seeds": [0, 1, 2, 4, 3],
    "device": "cuda",
    "threads": 1,
    "checkpoint_every": 499,
    "quick": True,
    "task.n_keys": 15,
    "task.n_values": 17,
    "task.n_pairs": 7,
    "model.n_layers": 1,
    "model.n_heads": 8,
    "model.d_model": 128,
    "model.d_head": 16,
    "model.d_mlp": 64,
    "model.attn_only": True,
    "model.act_fn": "relu",
    "model.normalization_type": "none",
    "model.positional_embedding_type": "rotary",
    "optimizer.name": "adam",
    "optimizer.learning_rate": 0.0010000000000000002,
    "optimizer.weight_decay": 5e-324,
    "optimizer.batch_size": 127,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.99,
    "optimizer.eps": 1e-7,
    "anchor.updates": 2950,
    "anchor.evaluate_every": 60,
    "anchor.excess_loss": 0.2,
    "anchor.answer_share": 0.9,
    "anchor.margin_drift": 0.4,
    "anchor.require_convergence": False,
    "schedule.shape": "smooth",
    "schedule.p0": 0.6,
    "schedule.delta": 0.1,
    "schedule.steps": 8,
    "schedule.dwell": 13,
    "schedule.labels": "independent",
    "schedule.label_noise": 0.1,
    "schedule.same_order": True,
    "relaxation.measure_at": [0, 25],
    "measurement.conflict_trials": 2047,
    "measurement.patching_trials": 255,
    "measurement.circuits": False,
    "memory.shuffled": 4,
    "memory.replicates": 0,
    "memory.observe_every": 1,
    "memory.margin": 0.1,
}
NOT_ALONE = {"task.name", "schedule.parameter"}  # another choice needs other settings with it


class TestHash:
    def test_the_list_of_other_values_is_complete(self) -> None:
        dumped = StudyConfig().model_dump()
        names = {name for name, value in dumped.items() if not isinstance(value, dict)}
        for table, value in dumped.items():
            names |= {f"{table}.{name}" for name in value} if isinstance(value, dict) else set()
        assert names == OTHERS.keys() | NOT_ALONE

    @pytest.mark.parametrize("name", OTHERS)
    def test_changes_with_every_setting(self, name: str) -> None:
        changed = StudyConfig.from_dict(_nested(name, OTHERS[name]))
        assert changed != StudyConfig()
        assert changed.hash != StudyConfig().hash

    def test_changes_with_what_the_loop_moves(self) -> None:
        one, two = (
            StudyConfig(schedule=ScheduleConfig(parameter=name, delta=1e-4))
            for name in ("mixture", "learning_rate")
        )
        assert one.hash != two.hash

    def test_changes_with_the_momentum(self) -> None:
        one, two = (StudyConfig(optimizer=SGDConfig(momentum=m)) for m in (0.0, 0.9))
        assert one.hash != two.hash

    def test_tells_all_of_them_apart(self) -> None:
        configs = [StudyConfig.from_dict(_nested(*other)) for other in OTHERS.items()]
        assert len({config.hash for config in configs}) == len(OTHERS)


def _nested(name: str, value: object) -> dict[str, Any]:
    """`{"table": {"field": value}}` for "table.field"."""
    table, _, field = name.rpartition(".")
    return {table: {field: value}} if table else {field: value}


# Setting, bad value, and how the message goes on after the setting's name.
BAD: list[tuple[str, Any, str]] = [
    ("nonsense", 1, " = 1: there is no such setting"),
    ("task.nonsense", "x", " = 'x': there is no such setting"),
    ("optimizer.momentum", 0.5, " = 0.5: there is no such setting"),
    ("schedule.Delta", 0.1, " = 0.1: there is no such setting"),
    ("task", 3, " = 3: Input should be a valid dictionary"),
    ("task.name", "copying", "Input tag 'copying' found using 'name' does not match"),
    ("task.n_keys", 2, " = 2: Input should be greater than or equal to 3"),
    ("task.n_keys", 17, "n_values = 16 must be at least n_keys = 17: the fixed rule"),
    ("task.n_keys", 8.0, " = 8.0: Input should be a valid integer"),
    ("task.n_keys", "8", " = '8': Input should be a valid integer"),
    ("task.n_keys", None, " = None: Input should be a valid integer"),
    ("task.n_pairs", 1, " = 1: Input should be greater than or equal to 2"),
    ("task.n_pairs", 16, "n_pairs = 16 must be below n_keys = 16: the corruption `key`"),
    ("task.n_pairs", 20, "n_pairs = 20 exceeds n_keys = 16: the keys of a prompt are distinct"),
    ("task.n_values", 15, "n_values = 15 must be at least n_keys = 16"),
    ("model.n_layers", 0, " = 0: Input should be greater than or equal to 1"),
    ("model.n_layers", True, " = True: Input should be a valid integer"),
    ("model.n_heads", 5, "n_heads = 5 does not divide d_model = 64: set d_head explicitly"),
    ("model.d_head", 0, " = 0: Input should be greater than or equal to 1"),
    ("model.act_fn", "tanh", " = 'tanh': Input should be 'relu', 'gelu', 'gelu_new' or 'silu'"),
    ("model.attn_only", "yes", " = 'yes': Input should be a valid boolean"),
    ("model.attn_only", 1, " = 1: Input should be a valid boolean"),
    ("model.normalization_type", None, " = None: Input should be 'LN', 'LNPre', 'RMS'"),
    ("optimizer", "adam", " = 'adam': Input should be a valid dictionary"),
    ("optimizer.name", "lion", "Input tag 'lion' found using 'name' does not match any of"),
    ("optimizer.learning_rate", 0, " = 0: Input should be greater than 0"),
    ("optimizer.learning_rate", float("nan"), " = nan: Input should be a finite number"),
    ("optimizer.learning_rate", float("inf"), " = inf: Input should be a finite number"),
    ("optimizer.learning_rate", "0.1", " = '0.1': Input should be a valid number"),
    ("optimizer.weight_decay", -0.1, " = -0.1: Input should be greater than or equal to 0"),
    ("optimizer.beta1", 1.0, " = 1.0: Input should be less than 1"),
    ("optimizer.batch_size", 0, " = 0: Input should be greater than or equal to 1"),
    ("anchor.updates", 0, " = 0: Input should be greater than or equal to 1"),
    ("anchor.answer_share", 1.1, " = 1.1: Input should be less than or equal to 1"),
    ("schedule.shape", "square", " = 'square': Input should be 'staircase' or 'smooth'"),
    ("schedule.p0", 1.5, " = 1.5: Input should be less than or equal to 1"),
    ("schedule.p0", -0.5, " = -0.5: Input should be greater than or equal to 0"),
    ("schedule.p0", 0.9, "delta = 0.2 around p0 = 0.9 gives mixtures from 0.7 to 1.1: a mixture"),
    ("schedule.p0", 0.1, "delta = 0.2 around p0 = 0.1 gives mixtures from -0.1 to 0.3: a mixture"),
    ("schedule.delta", 0.7, "delta = 0.7 around p0 = 0.5 gives mixtures from -0.2 to 1.2"),
    ("schedule.parameter", "momentum", " = 'momentum': String should match pattern"),
    ("schedule.delta", 0.0, " = 0.0: Input should be greater than 0"),
    ("schedule.delta", True, " = True: Input should be a valid number"),
    ("schedule.steps", 6, " = 6: Input should be a multiple of 4"),
    ("schedule.steps", 0, " = 0: Input should be greater than or equal to 4"),
    ("relaxation.measure_at", [], "measure_at = []: at least one relaxation"),
    ("relaxation.measure_at", [0], "measure_at = [0]: the branches are to relax"),
    ("relaxation.measure_at", [5, 1], "measure_at = [5, 1] must rise, without repeats"),
    ("relaxation.measure_at", [1, 1], "measure_at = [1, 1] must rise, without repeats"),
    ("relaxation.measure_at", [0, 1.5], ".1 = 1.5: Input should be a valid integer"),
    ("relaxation.measure_at", [-1, 1], ".0 = -1: Input should be greater than or equal to 0"),
    ("measurement.conflict_trials", 1, " = 1: Input should be greater than or equal to 2"),
    ("measurement.patching_trials", 4096, "patching_trials = 4096 exceeds conflict_trials = 2048"),
    ("seeds", [], "seeds = []: a study needs at least one seed"),
    ("seeds", [3, 1, 3], "seeds = [3, 1, 3]: a seed that stands twice is no replicate"),
    ("seeds", [0, -1], ".1 = -1: Input should be greater than or equal to 0"),
    ("seeds", list(range(31)), "31 seeds: the exact sign-flip test counts all 2^n signs"),
    ("seeds", [2**63], f".0 = {2**63}: Input should be less than {2**63}"),
    ("seeds", [True], ".0 = True: Input should be a valid integer"),
    ("seeds", 5, " = 5: Input should be a valid tuple"),
    ("seeds", "012", " = '012': Input should be a valid tuple"),
    ("device", "meta", " = 'meta': String should match pattern"),
    ("device", "cuda:", " = 'cuda:': String should match pattern"),
    ("device", 0, " = 0: Input should be a valid string"),
    ("threads", 0, " = 0: Input should be greater than or equal to 1"),
    ("threads", 10**6, " = 1000000: Input should be less than or equal to 1024"),
    ("checkpoint_every", 0, " = 0: Input should be greater than or equal to 1"),
    ("quick", "no", " = 'no': Input should be a valid boolean"),
]


class TestBadSettings:
    @pytest.mark.parametrize(("name", "value", "rule"), BAD, ids=[f"{n}={v}" for n, v, _ in BAD])
    def test_are_refused_by_name_value_and_rule(self, name: str, value: object, rule: str) -> None:
        # A rule between the fields of a table follows the table's name.
        table = name.rpartition(".")[0]
        named = name if rule[0] in " ." else f"{table}: " if table else ""
        with pytest.raises(HysteresisError, match=f"^{re.escape(f'bad settings: {named}{rule}')}"):
            StudyConfig.from_dict(_nested(name, value))

    def test_n_values_leave_room_for_the_corruption(self) -> None:
        with pytest.raises(HysteresisError, match="n_pairs = 4 must be at most n_values - 2 = 3"):
            AssociativeRecallConfig(n_keys=5, n_values=5, n_pairs=4)

    def test_rotary_turns_pairs(self) -> None:
        with pytest.raises(HysteresisError, match="model: d_head = 5 is odd: the rotary"):
            ModelConfig(positional_embedding_type="rotary", d_head=5)
        with pytest.raises(HysteresisError, match="model: d_head = 3 is odd: the rotary"):
            ModelConfig(positional_embedding_type="rotary", d_model=12)

    def test_all_of_a_table_are_named_at_once(self) -> None:
        with pytest.raises(HysteresisError, match=r"^bad settings: threads = 0: .*; x = 1: "):
            StudyConfig.from_dict({"threads": 0, "x": 1})

    @pytest.mark.parametrize("text", ["seeds", "seeds = [0]\nseeds = [1]", "[task]\n[task]", "\0"])
    def test_not_toml(self, text: str) -> None:
        with pytest.raises(HysteresisError, match="^not TOML: "):
            StudyConfig.from_toml_text(text)

    def test_not_json(self) -> None:
        with pytest.raises(HysteresisError, match="^not JSON: "):
            StudyConfig.from_json("{")
        with pytest.raises(HysteresisError, match="settings are a JSON object, not list"):
            StudyConfig.from_json("[1]")

    def test_the_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "study.toml"
        for unreadable in (path, tmp_path):
            with pytest.raises(HysteresisError, match=f"^cannot read the config {unreadable}: "):
                StudyConfig.from_toml(unreadable)
        path.write_bytes(b"seeds = [0] # \xff")
        with pytest.raises(HysteresisError, match=f"^cannot read the config {path}: .*utf-8"):
            StudyConfig.from_toml(path)
        path.write_text("seeds = []")
        with pytest.raises(HysteresisError, match=f"^{path}: bad settings: seeds"):
            StudyConfig.from_toml(path)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        StudyConfig().seeds = (1,)
    with pytest.raises(ValidationError, match="frozen"):
        StudyConfig().model.n_heads = 2


@pytest.mark.parametrize("edge", [(0.5, 0.5), (0.3, 0.3), (0.7, 0.3), (0.9, 0.1), (0.1, 0.1)])
def test_mixtures_may_reach_zero_and_one(edge: tuple[float, float]) -> None:
    p0, delta = edge
    assert ScheduleConfig(p0=p0, delta=delta).delta == delta


class TestWhatTheLoopMoves:
    @pytest.mark.parametrize(
        ("parameter", "delta", "rule"),
        [
            ("learning_rate", 0.2, "around learning_rate = 0.001 gives values from -0.199"),
            ("learning_rate", 0.001, "around learning_rate = 0.001 gives values from 0 to 0.002"),
            ("weight_decay", 0.1, "around weight_decay = 0 gives values from -0.1 to 0.1"),
            ("label_noise", 0.1, "around label_noise = 0 gives values from -0.1 to 0.1"),
            ("task.n_pairs", 0.5, "task.n_pairs = 7.5: Input should be a valid integer"),
            ("task.size", 0.5, "schedule.parameter = 'task.size': the task has no setting size"),
            ("task.name", 0.5, "moves name, which is 'associative_recall': the loop moves a numb"),
        ],
    )
    def test_is_refused_where_it_cannot_be(self, parameter: str, delta: float, rule: str) -> None:
        with pytest.raises(HysteresisError, match=re.escape(rule)):
            StudyConfig.from_dict({"schedule": {"parameter": parameter, "delta": delta}})

    @pytest.mark.parametrize(
        ("settings", "centre"),
        [
            ({"schedule": {"p0": 0.4}}, 0.4),
            ({"schedule": {"parameter": "learning_rate", "delta": 5e-4}}, 1e-3),
            (
                {
                    "schedule": {"parameter": "weight_decay", "delta": 0.1},
                    "optimizer": {"weight_decay": 0.3},
                },
                0.3,
            ),
            ({"schedule": {"parameter": "label_noise", "label_noise": 0.2}}, 0.2),
            (
                {
                    "schedule": {"parameter": "task.x"},
                    "task": {"name": "custom", "factory": "a:b", "parameters": {"x": 2}},
                },
                2.0,
            ),
        ],
    )
    def test_is_moved_around_its_own_setting(self, settings: Any, centre: float) -> None:
        config = StudyConfig.from_dict(settings)
        assert config.centre == centre
        assert StudyConfig.from_toml_text(config.to_toml()) == config
        assert StudyConfig.from_json(config.to_json()) == config
