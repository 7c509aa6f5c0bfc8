"""Weight erasure: which training writes over its initial weights, and what constraints do to it."""
