"""Transformers: constrained recipes against Muon with tuned weight decay."""
