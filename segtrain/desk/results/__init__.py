"""What people look at after training: scores of each image, pages, comparisons."""
