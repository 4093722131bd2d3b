"""The checks of tools/test_gpus.py, one idea a file."""
