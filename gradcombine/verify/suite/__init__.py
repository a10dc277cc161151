"""What the `gradcombine verify` command runs: a real model's gradients, combined in every place and framework."""
