"""What a population has done and decided: population.json, and the rules of the exchange.

Population based training, arXiv:1711.09846. The choices of its section 4.1 are here: exploit by
truncation selection, with quarters instead of fifths; explore by a factor of 0.8 or 1.2.
"""

import math
from typing import Literal

import numpy as np
from pydantic import Field

from segtrain.config import Config, override_config
from segtrain.config.loading import yaml_value
from segtrain.errors import ConfigError
from segtrain.run.directory import flat
from segtrain.run.division import Record
from segtrain.seed import population_rng
from segtrain.text import MAX_NAME, printable, table_lines

FILE = "population.json"
FACTORS = (0.8, 1.2)

Options = dict[str, float]
"""The values of the options that are searched, by their full names."""


class Row(Record):
    """A member at the end of a round; without a score (eval.best) it has diverged."""

    score: float | None
    options: Options  # with which it trained in this round


class Takeover(Record):
    """`member` goes on with the weights of `source`, and with these options."""

    member: int
    source: int
    options: Options


class Round(Record):
    """The training of all members to `step`, and the exchange that follows it.

    rows: by member, as they come.
    exchange: None until all of it is done; one that is interrupted is decided and done again.
    """

    step: int
    rows: dict[int, Row] = Field(default_factory=dict)
    exchange: list[Takeover] | None = None


class History(Record):
    """What a population was started with, and its rounds: every one, also those to come."""

    format: Literal[3] = 3
    members: int
    every: int
    perturb: list[str]
    alone: bool
    rounds: list[Round] = Field(default_factory=list)
    config: Config

    def model_post_init(self, _: object) -> None:
        """Begins the rounds of a new population."""
        steps = (*range(self.every, self.config.train.steps, self.every), self.config.train.steps)
        self.rounds = self.rounds or [Round(step=step) for step in steps]

    def options_of(self, member: int, number: int) -> Options:
        """The options with which `member` trains in round `number`, counted from 0."""
        # The last takeover before this round decides.
        for past in reversed(self.rounds[:number]):
            for takeover in past.exchange or ():
                if takeover.member == member:
                    return takeover.options
        values = flat(self.config)
        options = {key: values[key] for key in self.perturb}
        if member == 0:
            return options
        # Stream 0 is for the beginning; the exchange after round `number` draws from number + 1.
        return perturbed(self.config, options, population_rng(self.config.seed, 0, member))

    def seeded(self, member: int, options: Options) -> dict[str, float]:
        """`options` and the seed of `member`."""
        return {"seed": self.config.seed + member} | options

    def has_diverged(self, member: int, number: int) -> bool:
        """Whether `member` has nothing to go on from in round `number`: it took nothing over."""
        if number == 0:
            return False
        before = self.rounds[number - 1]
        took_over = any(takeover.member == member for takeover in before.exchange or ())
        return before.rows[member].score is None and not took_over

    def best(self) -> tuple[int, float, int]:
        """The member whose best.pt has the highest score, that score, and its step."""
        kept: list[tuple[float, int]] = [(-math.inf, 0)] * self.members
        for past in self.rounds:
            for member, row in past.rows.items():
                if row.score is not None and row.score > kept[member][0]:
                    kept[member] = (row.score, past.step)
            # All take over at once: a source counts with what it had before the exchange.
            before = list(kept)
            for takeover in past.exchange or ():
                kept[takeover.member] = before[takeover.source]
        member = max(range(self.members), key=lambda i: kept[i][0])
        return member, *kept[member]


def with_options(config: Config, options: Options) -> Config:
    """`config` with these options; ConfigError if they do not fit."""
    overrides = [f"{key}={yaml_value(value)}" for key, value in options.items()]
    return override_config(config, overrides, source="the population")


def perturbed(config: Config, options: Options, rng: np.random.Generator) -> Options:
    """Each option times 0.8 or 1.2; it stays as it is where `config` refuses the product."""
    varied = dict(options)
    for key, value in options.items():
        changed = times(value, FACTORS[rng.integers(len(FACTORS))])
        try:
            with_options(config, varied | {key: changed})
        except ConfigError:
            continue
        varied[key] = changed
    return varied


def times(value: float, factor: float) -> float:
    """The product with six digits: 0.0192, and not 0.019200000000000002."""
    return float(f"{value * factor:.6g}")


def decide(history: History, number: int) -> list[Takeover]:
    """Who takes over from whom after round `number`, counted from 0.

    Each of the worst quarter, at least one member, and each that has diverged takes over from a
    random one of the best quarter, if that is better. Ties go to the earlier member. The order in
    which the members came to their ends does not matter.
    """
    rows, quarter = history.rounds[number].rows, max(1, history.members // 4)
    values = (rows[i].score for i in range(history.members))
    scores = [-math.inf if value is None else value for value in values]
    ranking = sorted(range(history.members), key=lambda i: scores[i], reverse=True)
    best = [i for i in ranking[:quarter] if scores[i] > -math.inf]
    worst = {*ranking[-quarter:], *(i for i in ranking if scores[i] == -math.inf)}
    takeovers = []
    for member in sorted(worst) if best else ():
        # A stream of its own: the draw does not depend on how many others take over.
        rng = population_rng(history.config.seed, number + 1, member)
        source = best[rng.integers(len(best))]
        if scores[source] > scores[member]:
            options = perturbed(history.config, rows[source].options, rng)
            takeovers.append(Takeover(member=member, source=source, options=options))
    return takeovers


def table(history: History) -> list[str]:
    """A line of titles, and one for each member and round, for a terminal."""
    keys = history.perturb
    by = printable(history.config.eval.best_name, MAX_NAME)
    lines = [("round", "step", "member", by, *keys, "takes_from")]
    for number, past in enumerate(history.rounds, start=1):
        sources = {takeover.member: takeover.source for takeover in past.exchange or ()}
        for member, row in sorted(past.rows.items()):
            score = "" if row.score is None else f"{row.score:.4f}"
            options = [f"{row.options[key]:g}" for key in keys]
            cells = (number, past.step, member, score, *options, sources.get(member, ""))
            lines.append(tuple(map(str, cells)))
    return table_lines(zip(*lines, strict=True))
