import pytest

from segtrain.config import parse_config
from segtrain.distributed.partition import batch_findings, smallest_batch

DATA = "data: {layout: folders, root: /data, classes: voc}\n"


def config(text):
    return parse_config(DATA + text, source="f.yaml")


@pytest.mark.fault(69)
@pytest.mark.parametrize(
    ("train", "ranks", "said"),
    [
        ("batch_size: 4", 5, "4 images leave some of 5 ranks without an image; use at least 5"),
        (
            "batch_size: 8, accumulate_steps: 3",
            4,
            "8 images in 3 passes leave some of 4 ranks without an image; use at least 12",
        ),
        (
            "batch_size: 8, virtual_ranks: 3",
            3,
            "8 images leave some of 3 x 3 virtual ranks without an image; use at least 9",
        ),
    ],
)
def test_every_rank_needs_an_image_in_every_pass(train, ranks, said):
    assert batch_findings(config(f"train: {{{train}}}"), ranks, ranks) == [
        f"train.batch_size: {said}"
    ]


def test_an_image_alone_has_no_statistics_after_global_pooling():
    local = config("train: {batch_size: 5}\nnorm: {kind: local}\n")
    assert batch_findings(local, 2, 2) == []
    (finding,) = batch_findings(local, 3, 3)  # 2 + 2 + 1
    assert "let at least 2 images share statistics (norm.kind: local, 3 ranks)" in finding


def test_the_smallest_batch_of_each_extent():
    sizes = {}
    for extent in ("world", "node", 2):
        norm = f"train: {{batch_size: 11}}\nnorm: {{extent: {extent}}}\n"
        sizes[extent] = smallest_batch(config(norm), ranks=6, ranks_here=3)
    assert sizes == {"world": 11, "node": 5, 2: 3}  # 2 + 2 + 2 + 2 + 2 + 1
