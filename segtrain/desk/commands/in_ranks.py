"""The commands of the desk that work in ranks, which they start."""

from functools import partial

from segtrain.commands.launch import on_this_machine

verify = partial(on_this_machine, "desk.commands.verify:run_verify")
bench = partial(on_this_machine, "desk.commands.bench:run_bench")
