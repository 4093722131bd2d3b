"""`segtrain population`: runs that take over weights and options from each other."""
