"""The parts of `studies.gpt`: text, network, optimizers, training, sampling, report."""
