"""Peers, ablations and their sweep: which variants of a run are made, and what they recommend."""
