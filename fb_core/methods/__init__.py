"""Peer methods, one file each."""
