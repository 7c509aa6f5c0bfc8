"""Parts of the character GPT: text, network, optimizers, training, sampling, report."""
