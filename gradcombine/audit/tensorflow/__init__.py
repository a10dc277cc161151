"""Audits TensorFlow graphs, as far as they can be read without running them."""
