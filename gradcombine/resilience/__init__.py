"""Fault tolerance: which microbatches a window holds, and which replicas are faulty."""
