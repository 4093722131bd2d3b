"""The directory of a run: its files, lock, log and pictures."""
