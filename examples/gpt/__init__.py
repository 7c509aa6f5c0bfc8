"""The parts of `examples.hello_gpt`: text, network, optimizers, training, sampling, report."""
