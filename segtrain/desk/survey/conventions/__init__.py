"""How folders say which label is whose: a file for each convention, and what compares their claims.

None knows of another. Each has a folder that it reads in the docstring of its file.
"""
