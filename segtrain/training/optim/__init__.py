"""What moves the weights.

schedule.py says how fast, layers.py what each weight is subject to (rate, decay, frozen or not),
optimizer.py makes the optimizer and averages weights, initial_weights.py keeps what an update needs
of the weights that training started from.
"""
