"""The `gradcombine verify` command: a real model's gradients, combined in all modes of all frameworks."""
