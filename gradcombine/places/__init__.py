"""Runs a reduction over a list, over time, over replicas, and over windows of time and replicas."""
