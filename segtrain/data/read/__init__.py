"""From files to images with train ids: layouts, lists, decoding, classes, fingerprints."""
