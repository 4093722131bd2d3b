"""The scores of a data set, by image, class, group and threshold."""
