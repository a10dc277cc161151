"""What a compiled step does, on the machine that it will run on."""
