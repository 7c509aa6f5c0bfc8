"""Short programs that show the package at work; docs/examples.md lists them."""
