"""From images to training batches: geometry, colours, mixing, the stream, the loader."""
