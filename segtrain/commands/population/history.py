"""What a population has done and decided: population.json, and the rules of the exchange.

Population based training, arXiv:1711.09846. The choices of its section 4.1 are here: exploit by
truncation selection, with quarters instead of fifths; explore by a factor of 0.8 or 1.2.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from segtrain import files
from segtrain.config import Config, override_config
from segtrain.config.loading import yaml_value
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.seed import population_rng

FILE = "population.json"
FACTORS = (0.8, 1.2)

_MAX_BYTES = 64 << 20

Options = dict[str, float]
"""The values of the options that are searched, by their full names."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Row(_Entry):
    """A member at the end of a round; without a score it has diverged."""

    options: Options  # with which it trained in this round
    mean_iou: float | None


class Takeover(_Entry):
    """`member` goes on with the weights of `source`, and with these options."""

    member: int
    source: int
    options: Options


class Round(_Entry):
    """The training of all members to `step`, and the exchange that follows it.

    A row is added when a member has come to the step. `exchange` is written before any of it is
    done, and `applied` when all of it is: so an interruption anywhere changes no decision.
    """

    step: int
    rows: list[Row] = []
    exchange: list[Takeover] | None = None
    applied: bool = False


class History(_Entry):
    """What a population was started with, and its rounds so far."""

    format: Literal[1] = 1
    members: int
    every: int
    perturb: list[str]
    alone: bool
    config: Config
    rounds: list[Round] = []

    @property
    def ends(self) -> list[int]:
        """The last step of each round."""
        steps = self.config.train.steps
        return [*range(self.every, steps, self.every), steps]

    def options_of(self, member: int) -> Options:
        """The options with which `member` trains in the newest round."""
        for past in reversed(self.rounds[:-1]):
            for takeover in past.exchange or ():
                if takeover.member == member:
                    return takeover.options
        options = {key: option_value(self.config, key) for key in self.perturb}
        if member == 0:
            return options
        return perturbed(self.config, options, population_rng(self.config.seed, 0, member))

    def has_diverged(self, member: int) -> bool:
        """Whether `member` has nothing to go on from: it diverged and took nothing over."""
        if len(self.rounds) < 2:
            return False
        before = self.rounds[-2]
        took_over = any(takeover.member == member for takeover in before.exchange or ())
        return before.rows[member].mean_iou is None and not took_over

    def best(self) -> tuple[int, float, int]:
        """The member whose best.pt has the highest score, that score, and its step."""
        kept: list[tuple[float, int]] = [(-math.inf, 0)] * self.members
        for past in self.rounds:
            for member, row in enumerate(past.rows):
                if row.mean_iou is not None and row.mean_iou > kept[member][0]:
                    kept[member] = (row.mean_iou, past.step)
            before = list(kept)
            for takeover in past.exchange or ():
                kept[takeover.member] = before[takeover.source]
        member = max(range(self.members), key=lambda i: kept[i][0])
        return member, *kept[member]


def option_value(config: Config, key: str) -> object:
    """The value of the option `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_options(config: Config, options: Options) -> Config:
    """`config` with these options; ConfigError if they do not fit."""
    overrides = [f"{key}={yaml_value(value)}" for key, value in options.items()]
    return override_config(config, overrides, source="the population")


def perturbed(config: Config, options: Options, rng: np.random.Generator) -> Options:
    """Each option times 0.8 or 1.2; it stays as it is where `config` refuses the product."""
    found = dict(options)
    for key, value in options.items():
        changed = times(value, FACTORS[rng.integers(len(FACTORS))])
        try:
            with_options(config, found | {key: changed})
        except ConfigError:
            continue
        found[key] = changed
    return found


def times(value: float, factor: float) -> float:
    """The product with six digits: 0.0192, and not 0.019200000000000002."""
    return float(f"{value * factor:.6g}")


def decide(history: History, number: int) -> list[Takeover]:
    """Who takes over from whom after round `number`, counted from 0.

    Each of the worst quarter, at least one member, and each that has diverged takes over from a
    random one of the best quarter, if that is better. Ties go to the earlier member.
    """
    rows, quarter = history.rounds[number].rows, max(1, history.members // 4)
    scores = [-math.inf if row.mean_iou is None else row.mean_iou for row in rows]
    ranking = sorted(range(len(rows)), key=lambda i: scores[i], reverse=True)
    best = [i for i in ranking[:quarter] if scores[i] > -math.inf]
    worst = {*ranking[-quarter:], *(i for i in ranking if scores[i] == -math.inf)}
    takeovers = []
    for member in sorted(worst) if best else ():
        rng = population_rng(history.config.seed, number + 1, member)
        source = best[rng.integers(len(best))]
        if scores[source] > scores[member]:
            options = perturbed(history.config, rows[source].options, rng)
            takeovers.append(Takeover(member=member, source=source, options=options))
    return takeovers


def table(history: History) -> tuple[list[str], list[list[str]]]:
    """Titles, and a row of cells for each member and round."""
    titles = ["round", "step", "member", "mIoU", *history.perturb, "takes_from"]
    cells = []
    for number, past in enumerate(history.rounds, start=1):
        sources = {takeover.member: takeover.source for takeover in past.exchange or ()}
        for member, row in enumerate(past.rows):
            score = "" if row.mean_iou is None else f"{row.mean_iou:.4f}"
            options = [f"{row.options[key]:g}" for key in history.perturb]
            source = str(sources.get(member, ""))
            cells.append([str(number), str(past.step), str(member), score, *options, source])
    return titles, cells


def aligned(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = (zip(row, widths, strict=True) for row in (titles, *cells))
    return ["  ".join(f"{cell:>{width}}" for cell, width in line) for line in lines]


def write(directory: Path, history: History) -> None:
    """Writes population.json; ExecutionError if it cannot."""
    try:
        files.write_atomic(directory / FILE, history.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ExecutionError(f"{directory / FILE}: cannot be written: {error.strerror}") from None


def read(directory: Path) -> History:
    """The population in `directory`; CheckpointError if its file cannot be read or is damaged."""
    path = directory / FILE
    try:
        return History.model_validate_json(files.read_bytes(path, _MAX_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path}: damaged: {where}: {first['msg']}") from None
