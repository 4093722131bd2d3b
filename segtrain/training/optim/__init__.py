"""What moves the weights.

schedule.py says how fast, layers.py what each weight is subject to (rate, decay, frozen, held at 0)
and what an update needs of the weights that training started from, optimizer.py makes the optimizer
and averages weights.
"""
