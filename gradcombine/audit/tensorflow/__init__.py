"""What a graph of TensorFlow exchanges, as far as that can be read without running it."""
