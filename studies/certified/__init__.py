"""Certified networks: which way of keeping weights orthonormal proves the most."""
