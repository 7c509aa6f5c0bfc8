"""A short training program for each framework: `python -m examples.frameworks.nnx`."""
