"""The desk: folders, finished runs and foreign files are looked at; the core works without it."""
