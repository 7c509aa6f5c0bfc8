"""The character GPT of the Modula package: network, optimizers, training, sampling, study."""
