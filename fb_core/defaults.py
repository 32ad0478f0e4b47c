"""Defaults that code and settings share, in a module that needs neither torch nor pydantic."""

# The override's certainty: the best of 0.6, 0.75 and 0.9 on validation problems of the demo's worlds. Test results at
# 0.9 had been seen before.
CERTAINTY = 0.6
