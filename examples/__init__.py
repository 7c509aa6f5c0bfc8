"""Short example programs; docs/examples.md lists them."""
