"""The training step: loss, gradients, optimizer, and what the ranks agree on in each step."""
