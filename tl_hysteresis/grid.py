"""Grids of studies: a base, axes of settings, and a cell for each combination of their values."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tl_hysteresis.config import StudyConfig
from tl_hysteresis.errors import HysteresisError

KEYS = ("base", "axes")
DWELLS = (2, 4, 8, 16, 32, 64)
"""Dwells of the quasi-static test: six octaves, a factor of 32."""


@dataclass(frozen=True)
class Cell:
    """One study of a grid.

    Attributes:
        config: its settings.
        values: what the axes are here, by the axis's name: a number, a text or a truth value.
    """

    config: StudyConfig
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """What its folder is called: the first 16 digits of the hash of its settings."""
        return self.config.hash[:16]

    @property
    def anchor(self) -> str:
        """The same for the settings of its anchors."""
        return self.config.of_anchors().hash[:16]

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Grid:
    """Settings that all studies share, and axes along which they differ.

    Attributes:
        base: nested settings, as in a study's TOML file; what is left out has its default.
        axes: for each setting, named as "table.setting" (or a table, or a setting of the top
            level), the values that it takes.
        cells: every combination of them, the last axis moving fastest.

    Raises:
        HysteresisError: no axis, an empty one, a setting that there is not, a cell whose settings
            cannot be, two cells with the same settings.

    Example:
        >>> grid = Grid.of({"seeds": [0, 1, 2]}, {"schedule.dwell": [2, 4], "schedule.p0": [0.5]})
        >>> [str(cell) for cell in grid.cells]
        ['schedule.dwell = 2, schedule.p0 = 0.5', 'schedule.dwell = 4, schedule.p0 = 0.5']
        >>> Grid.of({}, {"schedule.dwel": [2, 4]})
        Traceback (most recent call last):
        ...
        tl_hysteresis.errors.HysteresisError: the cell schedule.dwel = 2: bad settings: \
schedule.dwel = 2: there is no such setting
    """

    base: dict[str, Any]
    axes: dict[str, list[Any]]
    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, base: Mapping[str, Any] | StudyConfig, axes: Mapping[str, Iterable[Any]]) -> Grid:
        """The grid of a base and axes; every cell is checked."""
        if isinstance(base, StudyConfig):
            base = base.model_dump(mode="json")
        listed = {name: _values(name, values) for name, values in _flat(axes)}
        if not listed:
            raise HysteresisError("a grid without axes is one study: give it at least one axis")
        cells = tuple(
            _cell(base, dict(zip(listed, values, strict=True)))
            for values in product(*listed.values())
        )
        seen: dict[str, Cell] = {}
        for cell in cells:
            if cell.name in seen:
                raise HysteresisError(
                    f"the cells {seen[cell.name]} and {cell} have the same settings"
                )
            seen[cell.name] = cell
        return cls(dict(base), listed, cells)

    @classmethod
    def of_dwells(cls, config: StudyConfig, dwells: Iterable[int] = DWELLS) -> Grid:
        """One study at several dwells, for the quasi-static test: no circuits, little relaxation.

        Example:
            >>> [cell.config.schedule.dwell for cell in Grid.of_dwells(StudyConfig()).cells]
            [2, 4, 8, 16, 32, 64]
        """
        measurement = config.measurement.model_copy(update={"circuits": False})
        soonest = next(at for at in config.relaxation.measure_at if at > 0)
        relaxation = config.relaxation.model_copy(update={"measure_at": (0, soonest)})
        base = config.model_copy(update={"measurement": measurement, "relaxation": relaxation})
        return cls.of(base, {"schedule.dwell": dwells})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Grid:
        """The grid of a mapping with `base` and `axes`."""
        unknown = [key for key in data if key not in KEYS]
        if unknown:
            raise HysteresisError(f"a grid has no key {unknown[0]!r}; it has {' and '.join(KEYS)}")
        for key in KEYS:
            if not isinstance(data.get(key, {}), Mapping):
                raise HysteresisError(f"{key} = {data[key]!r} must be a table")
        return cls.of(data.get("base", {}), data.get("axes", {}))

    @classmethod
    def from_toml(cls, path: Path | str) -> Grid:
        """The grid of a TOML file with the tables `base` and `axes`.

        Raises:
            HysteresisError: a file that cannot be read, is not TOML, or holds a bad grid.
        """
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise HysteresisError(f"cannot read the grid {path}: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise HysteresisError(f"{path}: not TOML: {error}") from None
        try:
            return cls.from_dict(data)
        except HysteresisError as error:
            raise HysteresisError(f"{path}: {error}") from None

    def to_json(self) -> str:
        """The grid as JSON text."""
        return json.dumps({"base": self.base, "axes": self.axes}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Grid:
        """The grid that `to_json` wrote.

        Raises:
            HysteresisError: text that is not JSON, or a bad grid.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise HysteresisError(f"not JSON: {error}") from None
        if not isinstance(data, dict):
            raise HysteresisError(f"a grid is a JSON object, not {type(data).__name__}")
        return cls.from_dict(data)


def _flat(axes: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    """Axes by their whole names: a TOML key `schedule.dwell` without quotes is a table's."""
    for name, values in axes.items():
        if isinstance(values, Mapping):
            yield from _flat(values, f"{table}{name}.")
        else:
            yield f"{table}{name}", values


def _values(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise HysteresisError(f"the axis {name} = {values!r} must be a list of values")
    listed = list(values)
    if not listed:
        raise HysteresisError(f"the axis {name} is empty: list the values that it is to take")
    return listed


def _cell(base: Mapping[str, Any], values: Mapping[str, Any]) -> Cell:
    where = ", ".join(f"{name} = {_short(value)}" for name, value in values.items())
    try:
        settings = dict(base)
        for name, value in values.items():
            settings = _with(settings, name.split("."), value, name)
        config = StudyConfig.from_dict(settings)
    except HysteresisError as error:
        raise HysteresisError(f"the cell {where}: {error}") from None
    return Cell(config, {name: _short(value) for name, value in values.items()})


def _with(settings: Mapping[str, Any], path: list[str], value: Any, name: str) -> dict[str, Any]:
    """A copy of nested settings with one of them set."""
    first, rest = path[0], path[1:]
    if rest:
        inner = settings.get(first, {})
        if not isinstance(inner, Mapping):
            raise HysteresisError(f"{name}: {first} = {inner!r} is a setting, not a table")
        value = _with(inner, rest, value, name)
    return {**settings, first: value}


def _short(value: Any) -> Any:
    """A table or a list as text, so that it fits a cell of a data frame."""
    if isinstance(value, Mapping):
        value = value.get("name", value) if len(value) == 1 else dict(value)
    return json.dumps(value, default=str) if isinstance(value, Mapping | list) else value
