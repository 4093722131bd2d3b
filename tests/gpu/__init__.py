"""What only a CUDA device can answer: `pytest -m gpu`."""
