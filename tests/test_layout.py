"""The table of who computes which image, against rows computed by hand."""

from itertools import chain

import pytest

from segtrain.config import parse_config
from segtrain.distributed.layout import Layout, divide, even, partition, shares_of_ranks

DATA = "data: {layout: folders, root: /data, classes: voc}\n"


def rows(text, split):
    """[microbatch][rank][part], the positions as text."""
    train = parse_config(f"{DATA}train: {{{text}}}", source="f.yaml").train
    parts = Layout.of(train, split).parts
    return [[[" ".join(map(str, part)) for part in rank] for rank in ranks] for ranks in parts]


def test_the_rows_are_those_computed_by_hand():
    assert rows("batch_size: 7, accumulate_steps: 2", even(3)) == [
        [["0 1"], ["2"], ["3"]],
        [["4"], ["5"], ["6"]],
    ]
    # Virtual ranks cut what their rank has; the last of five ranks has nothing to cut.
    assert rows("batch_size: 4, virtual_ranks: 2", even(5))[0][-2:] == [["3", ""], ["", ""]]
    assert rows("batch_size: 7, virtual_ranks: 2", (5, 2)) == [[["0 1 2", "3 4"], ["5", "6"]]]
    # Shares of 2, 2, 2 and 1 images are cut before ranks, which take whole ones, at least one.
    shares = ["0 1", "2 3", "4 5", "6"]
    for split, ends in {(1,): [4], (1, 1, 1): [2, 3, 4], (9, 1): [3, 4], (3, 1): [3, 4]}.items():
        expected = [shares[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        assert rows("batch_size: 7, shares: 4", split) == [expected]


def test_what_readers_take_from_the_table():
    layout = Layout(11, 3, (1, 1), shares=3)
    assert layout.positions(0) == [range(3), range(4, 7), range(8, 10)]
    assert layout.positions(1) == [range(3, 4), range(7, 8), range(10, 11)]
    assert [layout.sizes(i, 0) for i in range(3)] == [[2, 1], [2, 1], [1, 1]]
    assert layout.everywhere == [[2, 1], [1]]
    assert (layout.shares, layout.images) == ((2, 1), (3, 1))


@pytest.mark.fault(70)
@pytest.mark.parametrize("batch_size", [1, 7, 12])
def test_each_microbatch_holds_the_same_images_on_any_number_of_ranks(batch_size):
    def assert_cut(parts, whole):
        assert list(chain.from_iterable(parts)) == list(whole)
        sizes = list(map(len, parts))
        assert max(sizes) - min(sizes) <= 1

    for microbatches in range(1, batch_size + 1):
        alone = Layout(batch_size, microbatches, (1,)).positions(0)
        assert_cut(alone, range(batch_size))
        for ranks in range(1, 9):
            layout = Layout(batch_size, microbatches, even(ranks))
            cut = [layout.positions(rank) for rank in range(ranks)]
            for whole, *parts in zip(alone, *cut, strict=True):
                assert_cut(parts, whole)


def test_ranks_take_whole_shares_which_are_the_same_for_any_split():
    assert shares_of_ranks(8, even(3)) == [3, 3, 2]
    for total in range(1, 14):
        for shares in range(1, total + 1):
            ((alone,),) = Layout(total, 1, (1,), shares=shares).parts
            assert [i for part in alone for i in part] == list(range(total))
            sizes = [len(part) for part in alone]
            assert (len(sizes), max(sizes) - min(sizes) <= 1) == (shares, True)
            for split in (*map(even, range(1, shares + 1)), (5, 3)[:shares], (0, 7, 1)[:shares]):
                if not any(split):
                    continue
                (cut,) = Layout(total, 1, split, shares=shares).parts
                assert [part for parts in cut for part in parts] == alone
                assert [len(parts) for parts in cut] == shares_of_ranks(shares, split)
                assert min(map(len, cut)) > 0
                is_even = max(map(len, cut)) - min(map(len, cut)) <= 1
                assert split != even(len(split)) or is_even


def test_what_is_divided_is_in_proportion_and_even_where_weights_are_equal():
    cases = {(8, (5, 3)): [5, 3], (7, (5, 3)): [4, 3], (3, (0, 2, 1)): [0, 2, 1]}
    cases |= {(4, (9, 1)): [4, 0], (1, (1, 3)): [0, 1], (5, (2, 2)): [3, 2]}
    for (total, split), counts in cases.items():
        assert divide(total, split) == counts
    assert divide(4, (9, 1), least=1) == [3, 1]
    assert divide(1, (1, 3), least=1) == [0, 1]
    for total in range(20):
        for ranks in range(1, 6):
            sizes = [len(partition(total, ranks, rank)) for rank in range(ranks)]
            assert divide(total, even(ranks)) == sizes
