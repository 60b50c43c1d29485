"""Settings of a study: frozen, validated, and written to and read from TOML and JSON.

Each field's meaning and unit stands under it; `tl-hysteresis init` writes these texts as comments.
Settings that the paper leaves open are marked *open*: they are this project's choice, made on seeds
100-104 (``data/calibration.csv``), never on the seeds that are reported.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from tl_hysteresis.errors import HysteresisError

Count = Annotated[int, Field(ge=1, le=10**8)]
# `strict=False` lets a list stand for a tuple, as in TOML and JSON; the items stay strict.
Naturals = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch and TOML can hold
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Settings(BaseModel):
    """A frozen table of settings; unknown keys and wrong types raise `HysteresisError`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
    table: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_field(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            settings = handler(data)
            settings.check()
        except ValidationError as error:
            raise HysteresisError(_explain(error, cls.table)) from None
        except ValueError as error:
            where = f"{cls.table}: " if cls.table else ""
            raise HysteresisError(f"bad settings: {where}{error}") from None
        return settings

    def check(self) -> None:
        """Rules between fields; raises `ValueError`."""


def _explain(error: ValidationError, table: str) -> str:
    """One line for each bad setting: its name, the value found, and the rule."""
    lines = []
    for problem in error.errors(include_url=False):
        name = ".".join([table] * bool(table) + [str(part) for part in problem["loc"]])
        rule = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            rule = "there is no such setting"
        value = "" if isinstance(problem["input"], dict) else f" = {problem['input']!r}"
        lines.append(f"{name}{value}: {rule}" if name else rule)
    return "bad settings: " + "; ".join(lines)


class AssociativeRecallConfig(Settings):
    """The ambiguous associative recall task."""

    table: ClassVar[str] = "task"

    name: Literal["associative_recall"] = "associative_recall"
    """Which task."""
    n_keys: Annotated[int, Field(ge=3)] = 16
    """Number of distinct key tokens (open)."""
    n_values: Annotated[int, Field(ge=3)] = 16
    """Number of distinct value tokens, at least n_keys, since each key has its own value (open)."""
    n_pairs: Annotated[int, Field(ge=2)] = 8
    """Key-value pairs in a prompt (open)."""

    def check(self) -> None:  # noqa: D102
        _check_sizes(self, told="n_pairs", key="key", value="value")


class SentenceRecallConfig(Settings):
    """The same question asked in sentences; the paper has no such task."""

    table: ClassVar[str] = "task"

    name: Literal["sentence_recall"] = "sentence_recall"
    """Which task."""
    n_names: Annotated[int, Field(ge=3)] = 16
    """Number of distinct names."""
    n_places: Annotated[int, Field(ge=3)] = 16
    """Number of distinct places, at least n_names, since each name has its own place."""
    max_facts: Annotated[int, Field(ge=2)] = 3
    """Most facts in a prompt, the queried one included."""
    min_fillers: Annotated[int, Field(ge=1)] = 3
    """Filler words in a prompt that has all its facts."""
    filler_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    """Probability that a further fact is left out, with filler words in its place. Below 1, since
    circuits are measured at other facts too."""

    def check(self) -> None:  # noqa: D102
        _check_sizes(self, told="max_facts", key="name", value="place")


def _check_sizes(settings: Settings, *, told: str, key: str, value: str) -> None:
    """What a fixed rule and the two corruptions need: keys and values that a prompt leaves over."""
    n_told, n_keys, n_values = (
        getattr(settings, size) for size in (told, f"n_{key}s", f"n_{value}s")
    )
    if n_values < n_keys:
        raise ValueError(
            f"n_{value}s = {n_values} must be at least n_{key}s = {n_keys}: "
            f"the fixed rule gives each {key} a {value} of its own"
        )
    if n_told > n_keys:
        raise ValueError(
            f"{told} = {n_told} exceeds n_{key}s = {n_keys}: the {key}s of a prompt are distinct"
        )
    if n_told == n_keys:
        raise ValueError(
            f"{told} = {n_told} must be below n_{key}s = {n_keys}: "
            f"the corruption `{key}` needs a {key} that is not in the prompt"
        )
    if n_told > n_values - 2:
        raise ValueError(
            f"{told} = {n_told} must be at most n_{value}s - 2 = {n_values - 2}: the corruption "
            f"`{value}` needs a {value} that is neither in the prompt nor the fixed answer"
        )


class CustomTaskConfig(Settings):
    """A task of your own: an object that obeys the `Task` protocol, made by a function of yours."""

    table: ClassVar[str] = "task"

    name: Literal["custom"] = "custom"
    """Which task."""
    factory: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """"module:function" (or a class) that makes the task; the module must be importable wherever
    the study runs."""
    parameters: dict[str, bool | int | float | str] = {}
    """What the factory is called with, by name."""


class ModelConfig(Settings):
    """The `HookedTransformer`; vocabulary and context length come from the task."""

    table: ClassVar[str] = "model"

    n_layers: Count = 2
    """Transformer blocks."""
    n_heads: Count = 4
    """Attention heads a block."""
    d_model: Count = 64
    """Width of the residual stream (open)."""
    d_head: Annotated[int, Field(ge=1)] | None = None
    """Width of a head; unset means d_model / n_heads."""
    d_mlp: Count = 128
    """Width of the MLP's hidden layer (open)."""
    attn_only: bool = False
    """Leave the MLPs out."""
    act_fn: Literal["relu", "gelu", "gelu_new", "silu"] = "gelu"
    """The MLP's activation function (open)."""
    normalization_type: Literal["LN", "LNPre", "RMS", "RMSPre", "none"] = "LN"
    """Normalisation, in TransformerLens's names; "none" for none."""
    positional_embedding_type: Literal["standard", "rotary", "shortformer"] = "standard"
    """Positional embedding, in TransformerLens's names."""

    def check(self) -> None:  # noqa: D102
        if self.d_head is None and self.d_model % self.n_heads:
            raise ValueError(
                f"n_heads = {self.n_heads} does not divide d_model = {self.d_model}: "
                "set d_head explicitly"
            )
        d_head = self.d_head or self.d_model // self.n_heads
        if self.positional_embedding_type == "rotary" and d_head % 2:
            raise ValueError(
                f"d_head = {d_head} is odd: the rotary embedding turns pairs of its dimensions"
            )


class _OptimizerSettings(Settings):
    table: ClassVar[str] = "optimizer"

    learning_rate: Positive = 1e-3
    """Step size (open)."""
    weight_decay: NonNegative = 0.0
    """Weight decay on every parameter: decoupled in adamw, an L2 term in adam and sgd (open)."""
    batch_size: Count = 128
    """Trials in an update (open)."""


class _AdamSettings(_OptimizerSettings):
    beta1: Decay = 0.9
    """Decay of the first moment, per update."""
    beta2: Decay = 0.999
    """Decay of the second moment, per update."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""


class AdamWConfig(_AdamSettings):
    """AdamW, as `torch.optim.AdamW`."""

    name: Literal["adamw"] = "adamw"
    """Which optimizer."""


class AdamConfig(_AdamSettings):
    """Adam with an L2 term, as `torch.optim.Adam`."""

    name: Literal["adam"] = "adam"
    """Which optimizer."""


class SGDConfig(_OptimizerSettings):
    """Gradient descent with momentum, as `torch.optim.SGD`."""

    name: Literal["sgd"] = "sgd"
    """Which optimizer."""
    momentum: Decay = 0.9
    """Share of the last step's direction that is kept."""


OptimizerConfig = AdamWConfig | AdamConfig | SGDConfig
TaskConfig = AssociativeRecallConfig | SentenceRecallConfig | CustomTaskConfig


class AnchorConfig(Settings):
    """Training at the balanced mixture, and when it counts as converged."""

    table: ClassVar[str] = "anchor"

    updates: Count = 3000
    """Updates at p0 before the branches part (open)."""
    evaluate_every: Count = 50
    """Updates between two evaluations of the training course."""
    excess_loss: Positive = 0.08
    """Converged: the loss on conflict trials is at most this many nats above the entropy floor."""
    answer_share: Probability = 0.98
    """Converged: at least this share of greedy answers is the contextual or the fixed one."""
    margin_drift: Positive = 0.15
    """Converged: the margin's mean moved by at most this many logits between the last fifth of the
    course and the fifth before it."""
    require_convergence: bool = True
    """Stop the study when an anchor has not converged."""

    def check(self) -> None:  # noqa: D102
        if self.updates % self.evaluate_every:
            raise ValueError(
                f"evaluate_every = {self.evaluate_every} does not divide updates = {self.updates}: "
                "the last evaluation, which judges convergence, belongs at the end"
            )


class ScheduleConfig(Settings):
    """The loop that each branch is sent through, and what else decides the targets."""

    table: ClassVar[str] = "schedule"

    parameter: Annotated[
        str, Field(pattern=r"^(mixture|learning_rate|weight_decay|label_noise|task\.\w+)$")
    ] = "mixture"
    """What the loop moves, around its own setting: "mixture" (around p0), "learning_rate" or
    "weight_decay" (the optimizer's), "label_noise", or "task.NAME", a number among the task's."""
    shape: Literal["staircase", "smooth"] = "staircase"
    """"staircase": level after level; "smooth": a new mixture at each update."""
    p0: Probability = 0.5
    """Balanced mixture: probability that a training target follows the contextual rule."""
    delta: Positive = 0.2
    """Half height of the loop, in the unit of what it moves (open)."""
    steps: Annotated[int, Field(ge=4, multiple_of=4)] = 16
    """Steps between the levels of the triangle, p0 to p0 again (open)."""
    dwell: Count = 14
    """Updates at each level (open). The smooth triangle takes as many updates in all."""
    labels: Literal["stratified", "independent"] = "stratified"
    """"stratified": each batch has its share of contextual targets to within one target;
    "independent": each target has a coin of its own (open). Holds for all training."""
    label_noise: Probability = 0.0
    """Share of the training targets that are a token drawn from the whole vocabulary instead."""
    same_order: bool = False
    """Control: send both branches through the loop from below. Their gap must be exactly zero."""

    def check(self) -> None:  # noqa: D102
        low, high = self.p0 - self.delta, self.p0 + self.delta
        if self.parameter == "mixture" and (low < 0.0 or high > 1.0):
            raise ValueError(
                f"delta = {self.delta} around p0 = {self.p0} gives mixtures from {low:g} to "
                f"{high:g}: a mixture is a probability, in [0, 1]"
            )


class RelaxationConfig(Settings):
    """Training at p0 after the loop, on the same batches for both branches."""

    table: ClassVar[str] = "relaxation"

    measure_at: Naturals = (0, 25, 100)
    """Updates after the loop at which checkpoints are kept and circuits measured; the margin is
    measured at every update up to the last of them."""

    def check(self) -> None:  # noqa: D102
        if not self.measure_at:
            raise ValueError("measure_at = []: at least one relaxation is to be measured")
        if self.measure_at[-1] == 0:
            raise ValueError("measure_at = [0]: the branches are to relax for at least one update")
        if list(self.measure_at) != sorted(set(self.measure_at)):
            raise ValueError(f"measure_at = {list(self.measure_at)} must rise, without repeats")


class MeasurementConfig(Settings):
    """How much is measured."""

    table: ClassVar[str] = "measurement"

    conflict_trials: Annotated[int, Field(ge=2)] = 2048
    """Held-out conflict trials a seed, for margins and mean replacement (open)."""
    patching_trials: Annotated[int, Field(ge=2)] = 256
    """Held-out conflict trials a seed, for activation patching (open)."""
    circuits: bool = True
    """Replace components and map routes in every kept checkpoint, and not only measure margins."""

    def check(self) -> None:  # noqa: D102
        if self.patching_trials > self.conflict_trials:
            raise ValueError(
                f"patching_trials = {self.patching_trials} exceeds "
                f"conflict_trials = {self.conflict_trials}: patching uses the first of them"
            )


class MemoryConfig(Settings):
    """The experiments on what holds the memory, run on a finished study."""

    table: ClassVar[str] = "memory"

    shuffled: Annotated[int, Field(ge=2)] = 6
    """Loops a seed whose updates are shuffled: the null distribution of order noise."""
    replicates: Annotated[int, Field(ge=0)] = 2
    """Further matched loops from each anchor, on other batches; the unit stays the anchor."""
    observe_every: Count = 5
    """Updates between two measurements while these models relax."""
    margin: Positive = 0.05
    """The gap, in logits, that is just too large to be called none (half the paper's)."""


class StudyConfig(Settings):
    """Everything that decides a study's numbers.

    Example:
        >>> config = StudyConfig(seeds=(0, 1), schedule=ScheduleConfig(dwell=7))
        >>> StudyConfig.from_toml_text(config.to_toml()) == config
        True
        >>> StudyConfig(schedule={"p0": 1.7})
        Traceback (most recent call last):
        ...
        tl_hysteresis.errors.HysteresisError: bad settings: schedule.p0 = 1.7: Input should be \
less than or equal to 1
    """

    seeds: Annotated[tuple[Seed, ...], Field(strict=False)] = (0, 1, 2, 3, 4)
    """Independent anchors: each seed has its own initial weights, fixed rule and examples."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """Where to compute: "cpu", "cuda" or "cuda:N"."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads; unset means as many as torch takes. Runs repeat to the bit at equal threads."""
    checkpoint_every: Count = 500
    """Updates between two saved states; a killed run loses at most this many."""
    quick: bool = False
    """Marks a reduced run, and its numbers wherever they show. `--quick` sets it, and reduces
    seeds, updates and trials besides; by itself it changes nothing else."""
    task: Annotated[TaskConfig, Field(discriminator="name")] = AssociativeRecallConfig()
    model: ModelConfig = ModelConfig()
    optimizer: Annotated[OptimizerConfig, Field(discriminator="name")] = AdamWConfig()
    anchor: AnchorConfig = AnchorConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    relaxation: RelaxationConfig = RelaxationConfig()
    measurement: MeasurementConfig = MeasurementConfig()
    memory: MemoryConfig = MemoryConfig()

    @field_validator("optimizer", mode="before")
    @classmethod
    def _adamw_unless_named(cls, value: Any) -> Any:
        return {"name": "adamw", **value} if isinstance(value, dict) else value

    @field_validator("task", mode="before")
    @classmethod
    def _recall_unless_named(cls, value: Any) -> Any:
        return {"name": "associative_recall", **value} if isinstance(value, dict) else value

    def check(self) -> None:  # noqa: D102
        if not self.seeds:
            raise ValueError("seeds = []: a study needs at least one seed")
        if len(self.seeds) > 30:
            raise ValueError(
                f"{len(self.seeds)} seeds: the exact sign-flip test counts all 2^n signs, "
                "at most 30 seeds"
            )
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(
                f"seeds = {list(self.seeds)}: a seed that stands twice is no replicate"
            )
        self._check_loop()

    @property
    def centre(self) -> float:
        """The value around which the loop moves its parameter, and at which anchors are trained.

        Raises:
            HysteresisError: a parameter that these settings do not have, or that is no number.

        Example:
            >>> StudyConfig().centre
            0.5
            >>> moved = {"parameter": "learning_rate", "delta": 5e-4}
            >>> StudyConfig(schedule=moved).centre
            0.001
        """
        try:
            return float(self._settings_moved(self.schedule.parameter))
        except ValueError as error:
            raise HysteresisError(f"bad settings: {error}") from None

    def _settings_moved(self, parameter: str) -> float:
        """The setting that a parameter's name stands for."""
        table: Mapping[str, Any] = {
            "mixture": self.schedule.p0,
            "label_noise": self.schedule.label_noise,
            "learning_rate": self.optimizer.learning_rate,
            "weight_decay": self.optimizer.weight_decay,
        }
        name = parameter.removeprefix("task.")
        if name != parameter:
            task = self.task
            table = task.parameters if isinstance(task, CustomTaskConfig) else task.model_dump()
        if name not in table:
            raise ValueError(f"schedule.parameter = {parameter!r}: the task has no setting {name}")
        value = table[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            numbers = [key for key, entry in table.items() if type(entry) is float]
            raise ValueError(
                f"schedule.parameter = {parameter!r} moves {name}, which is {value!r}: the loop "
                f"moves a number (here: {', '.join(numbers) or 'there is none'})"
            )
        return value

    def _check_loop(self) -> None:
        """Refuse a loop that leaves the values which its parameter can have."""
        parameter, delta = self.schedule.parameter, self.schedule.delta
        centre = self._settings_moved(parameter)
        low, high = centre - delta, centre + delta
        least, most = {
            "learning_rate": (math.nextafter(0.0, 1.0), math.inf),
            "weight_decay": (0.0, math.inf),
            "label_noise": (0.0, 1.0),
        }.get(parameter, (-math.inf, math.inf))
        if low < least or high > most:
            raise ValueError(
                f"schedule.delta = {delta} around {parameter} = {centre:g} gives values from "
                f"{low:g} to {high:g}: it must stay in [{least:g}, {most:g}]"
            )
        if parameter.startswith("task.") and not isinstance(self.task, CustomTaskConfig):
            for value in (low, high):
                type(self.task).model_validate(
                    self.task.model_dump() | {parameter.removeprefix("task."): value}
                )

    def as_quick(self) -> StudyConfig:
        """The same study in under a minute: two seeds, fewer updates and trials, marked `quick`."""
        every = self.anchor.evaluate_every
        updates = min(self.anchor.updates, max(1600 // every, 1) * every)
        return self.model_copy(
            update={
                "quick": True,
                "seeds": self.seeds[:2],
                "anchor": self.anchor.model_copy(
                    update={"updates": updates, "require_convergence": False}
                ),
                "measurement": self.measurement.model_copy(
                    update={
                        "conflict_trials": min(512, self.measurement.conflict_trials),
                        "patching_trials": min(64, self.measurement.patching_trials),
                    }
                ),
            }
        )

    def of_anchors(self) -> StudyConfig:
        """The settings on which the anchors depend; all others at a fixed value.

        Two studies for which these are equal have the same anchors, to the bit.

        Example:
            >>> fast, slow = (StudyConfig(schedule={"dwell": dwell}) for dwell in (2, 64))
            >>> fast.of_anchors() == slow.of_anchors()
            True
        """
        schedule, trials = self.schedule, self.measurement.conflict_trials
        fixed = {
            "quick": False,
            "anchor": self.anchor.model_dump() | {"require_convergence": False},
            # A loop that is possible around any other settings; the anchors do not see it.
            "schedule": {
                "parameter": "learning_rate",
                "delta": self.optimizer.learning_rate / 2,
                "p0": schedule.p0,
                "labels": schedule.labels,
                "label_noise": schedule.label_noise,
            },
            "relaxation": {},
            "measurement": {"conflict_trials": trials, "patching_trials": 2},
            "memory": {},
        }
        return type(self).from_dict(self.model_dump() | fixed)

    @property
    def hash(self) -> str:
        """SHA-256 of the settings, in hexadecimal: what names a run."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The settings as JSON text that `from_json` reads back."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StudyConfig:
        """Settings from plain nested mappings; what is left out has its default.

        Raises:
            HysteresisError: an unknown key, a wrong type, or a value against a rule.
        """
        return cls.model_validate(dict(data))

    @classmethod
    def from_json(cls, text: str) -> StudyConfig:
        """Settings from JSON text.

        Raises:
            HysteresisError: text that is not JSON, or bad settings.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise HysteresisError(f"not JSON: {error}") from None
        if not isinstance(data, dict):
            raise HysteresisError(f"settings are a JSON object, not {type(data).__name__}")
        return cls.from_dict(data)

    @classmethod
    def from_toml_text(cls, text: str) -> StudyConfig:
        """Settings from TOML text; what is left out has its default.

        Raises:
            HysteresisError: text that is not TOML, or bad settings.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise HysteresisError(f"not TOML: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_toml(cls, path: Path | str) -> StudyConfig:
        """Settings from a TOML file.

        Raises:
            HysteresisError: a file that cannot be read, is not TOML, or holds bad settings.
        """
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise HysteresisError(f"cannot read the config {path}: {error}") from None
        try:
            return cls.from_toml_text(text)
        except HysteresisError as error:
            raise HysteresisError(f"{path}: {error}") from None

    def to_toml(self) -> str:
        """The settings as TOML text, each with its meaning as a comment, that `from_toml` reads."""
        tables = [(name, value) for name, value in self if isinstance(value, Settings)]
        top = _toml_table(self, skip={name for name, _ in tables})
        parts = [top, *(f"[{name}]\n{_toml_table(value)}" for name, value in tables)]
        head = (
            "# (open): the paper leaves this setting open.\n"
            '# optimizer.name = "sgd" has momentum in the place of beta1, beta2 and eps.\n'
            '# task.name = "sentence_recall" or "custom" has settings of its own.\n'
        )
        return "\n".join([head, *parts])


def _toml_table(settings: Settings, skip: set[str] | None = None) -> str:
    """`key = value` lines, each under its meaning."""
    lines = []
    fields = type(settings).model_fields
    for name in sorted(fields, key=lambda name: name != "name"):
        if name in (skip or set()):
            continue
        value = getattr(settings, name)
        meaning = " ".join((fields[name].description or "").split())
        choices = get_args(fields[name].annotation)
        if len(choices) > 1 and all(isinstance(choice, str) for choice in choices):
            meaning += f" One of: {', '.join(choices)}."
        lines.append(f"# {meaning}")
        lines.append(f"# {name} =" if value is None else f"{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    """JSON's literals for strings, numbers, booleans and lists are TOML's; a mapping's is not."""
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
        )
    return json.dumps(value)
