"""Step lengths without a learning rate: automatic gradient descent."""
