"""A run directory: its files, log, pictures and reports."""
