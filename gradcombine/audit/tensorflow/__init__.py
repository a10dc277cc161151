"""Exchanges in a TensorFlow graph, as far as they can be read without running it."""
