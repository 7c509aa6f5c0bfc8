"""Programs that show the package at work; `make train` runs `examples.train`."""
