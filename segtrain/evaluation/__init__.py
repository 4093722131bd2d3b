"""From a model to predictions of one image, and to the scores of a data set."""
