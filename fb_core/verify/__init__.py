"""Judges of final answers, in processes of their own."""
