from segtrain.config import parse_config
from segtrain.distributed.partition import (
    parts_of_rank,
    shares_of_ranks,
)

DATA = "data: {layout: folders, root: /data, classes: voc}\n"


def config(text):
    return parse_config(DATA + text, source="f.yaml")


def test_ranks_take_whole_shares_which_are_the_same_for_any_number_of_ranks():
    assert shares_of_ranks(8, 3) == [3, 3, 2]
    assert parts_of_rank(7, 0, 2, None) == [range(4)]
    for total in range(1, 14):
        for shares in range(1, total + 1):
            alone = parts_of_rank(total, 0, 1, shares)
            assert [i for part in alone for i in part] == list(range(total))
            sizes = [len(part) for part in alone]
            assert (len(sizes), max(sizes) - min(sizes) <= 1) == (shares, True)
            for ranks in range(1, shares + 1):
                cut = [parts_of_rank(total, rank, ranks, shares) for rank in range(ranks)]
                assert [part for parts in cut for part in parts] == alone
                assert [len(parts) for parts in cut] == shares_of_ranks(shares, ranks)
                assert max(map(len, cut)) - min(map(len, cut)) <= 1
