"""Packs: the decoded rows of images and labels, read through a memory map."""
