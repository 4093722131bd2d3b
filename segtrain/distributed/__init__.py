"""Ranks: starting them, finding each other, exchanging tensors, noticing that some are lost.

Modules are imported by name, so that `segtrain --help` does not wait for torch.
"""
