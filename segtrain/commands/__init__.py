"""The commands of `segtrain`, one module or folder each."""
