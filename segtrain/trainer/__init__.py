"""`segtrain train`: from a config to a trained, evaluated and saved model."""
