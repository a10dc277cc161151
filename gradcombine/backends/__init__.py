"""What the algebra needs of a framework: `protocol`, how one is found: `registry`, and one file for each."""
