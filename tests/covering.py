"""Covering arrays: few configs in which every pair of options meets (Cohen et al., AETG, 1997)."""

import random
from collections.abc import Callable, Sequence
from itertools import combinations

Row = tuple[str, ...]


def pairs_of(groups: Sequence[Row], valid: Callable[[Row], bool]) -> list[Row]:
    """The pairs of options of different groups that can meet, in the order of the groups."""
    crossed = (product for pair in combinations(groups, 2) for product in _crossed(*pair))
    return [pair for pair in crossed if valid(pair)]


def covering(
    groups: Sequence[Row],
    valid: Callable[[Row], bool],
    seed: int,
    *,
    wanted: Callable[[Row], bool] = lambda pair: True,
) -> list[Row]:
    """Rows with at most one option of each group, in which every wanted pair of `pairs_of` occurs.

    Greedy: a row begins with a pair that has not met yet, and takes the option that brings most
    new pairs until none brings any. So it is not the shortest list.

    valid: whether the options of a row can meet; a row without one of them then can, too.
    """
    draw = random.Random(seed)
    pairs = [pair for pair in pairs_of(groups, valid) if wanted(pair)]
    left = {frozenset(pair) for pair in pairs}
    order, rows = draw.sample(pairs, len(left)), []
    for pair in order:
        if frozenset(pair) not in left:
            continue
        row = pair
        options = [option for group in groups if not {*group} & {*row} for option in group]
        draw.shuffle(options)
        while options:
            new = {one: sum(frozenset((one, each)) in left for each in row) for one in options}
            best = max(options, key=new.__getitem__)
            if not new[best]:
                break
            group = next(group for group in groups if best in group)
            if valid((*row, best)):
                row = (*row, best)
                options = [option for option in options if option not in group]
            else:
                options.remove(best)
        left -= {*map(frozenset, combinations(row, 2))}
        rows.append(row)
    return rows


def _crossed(first: Row, second: Row) -> list[Row]:
    return [(one, other) for one in first for other in second]
