"""One training loop a file, each written as its own users would write it."""
