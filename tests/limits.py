"""How long a test may wait: against hangs alone, whatever the load of the machine."""

HANG = 1800.0  # seconds
