"""Kernels in Triton, interpreted on a CPU."""
