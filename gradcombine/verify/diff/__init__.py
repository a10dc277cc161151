"""Comparison of two files of parameters or gradients, of any framework, leaf by leaf."""
