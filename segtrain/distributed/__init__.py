"""Ranks: starting them, joining their process group, exchanging tensors, noticing lost ranks.

`process_group` and `collectives` serve every program; `launcher` and the files beside it serve the
ranks that segtrain starts itself. Import modules by name: `segtrain --help` must not import torch.
"""
