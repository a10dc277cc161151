"""The `gradcombine verify` command: a real model's gradients, combined in every place and framework."""
