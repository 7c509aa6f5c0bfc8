"""Trees of parameters: key paths, values matched by path, parts of transformations."""
