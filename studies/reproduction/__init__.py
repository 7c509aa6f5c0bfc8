"""Reproductions of published examples: their protocols, and the table of numbers."""
