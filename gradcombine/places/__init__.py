"""Where contributions come together: in a list, over time, over replicas, and in a window over both."""
