"""Weight spaces: which set of matrices suits which network."""
