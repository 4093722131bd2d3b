"""What a folder holds and how to train on it: survey, decision and writing of `segtrain init`."""
