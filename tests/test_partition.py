from segtrain.config import parse_config
from segtrain.distributed.partition import divide, even, partition, parts_of_rank, shares_of_ranks

DATA = "data: {layout: folders, root: /data, classes: voc}\n"


def config(text):
    return parse_config(DATA + text, source="f.yaml")


def test_ranks_take_whole_shares_which_are_the_same_for_any_split():
    assert shares_of_ranks(8, even(3)) == [3, 3, 2]
    assert parts_of_rank(7, 0, (1, 1), None) == [range(4)]
    for total in range(1, 14):
        for shares in range(1, total + 1):
            alone = parts_of_rank(total, 0, (1,), shares)
            assert [i for part in alone for i in part] == list(range(total))
            sizes = [len(part) for part in alone]
            assert (len(sizes), max(sizes) - min(sizes) <= 1) == (shares, True)
            for split in (*map(even, range(1, shares + 1)), (5, 3)[:shares], (0, 7, 1)[:shares]):
                ranks = len(split)
                if not any(split):
                    continue
                cut = [parts_of_rank(total, rank, split, shares) for rank in range(ranks)]
                assert [part for parts in cut for part in parts] == alone
                assert [len(parts) for parts in cut] == shares_of_ranks(shares, split)
                assert min(map(len, cut)) > 0
                assert split != even(ranks) or max(map(len, cut)) - min(map(len, cut)) <= 1


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
