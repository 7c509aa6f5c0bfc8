"""Step lengths without a learning rate: automatic gradient descent and links in its place."""
