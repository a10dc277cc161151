"""The algebra inside the training loops of other libraries. Nothing here is imported by `gradcombine` itself."""
