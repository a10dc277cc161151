"""Integrations with the training loops of other libraries. `gradcombine` itself imports none of them."""
