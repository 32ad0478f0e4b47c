"""R2R: its router network, how it is trained inside a run, and how it decodes."""
