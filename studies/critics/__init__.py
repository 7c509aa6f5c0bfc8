"""Wasserstein critics: the share of a known distance that a Lipschitz network attains."""
