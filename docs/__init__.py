"""The documentation's pages, and the programs that build and check them (`make docs`)."""
