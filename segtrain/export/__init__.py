"""Trained models as files for other programs, each compared with the model before it is kept."""
