"""Trees of parameters: key paths, values matched by path, transformations with states by path."""
