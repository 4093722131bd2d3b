"""From a model to the prediction of one image, whole or by windows, on a device."""
