"""What a network tells of a pixel: its class, or each class by itself, or what a plugin adds.

A task is asked wherever tasks differ, from a label in a batch (`Targets`) to a picture on disk
(`Task`).
"""
