"""The method at events: when to ask, what is asked, which candidate is taken."""
