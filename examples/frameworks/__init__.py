"""One short training program for each framework: `python -m examples.frameworks.nnx`."""
