"""Which order of additions, precision and scaling made a result."""
