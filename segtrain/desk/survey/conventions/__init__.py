"""How folders say which label is whose: a file for each convention, with a folder that it reads.

`pairs.py` compares what they claim. folder_of_bands and numbered_channels give the images other
names and then go on as equal_names does; no other one knows of another.
"""
