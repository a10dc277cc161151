"""The primitives that the algebra needs (`protocol`), how one is chosen (`registry`), and one file a framework."""
