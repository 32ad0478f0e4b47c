"""The programs: what a command runs. The layer, which is all else of fb_core, imports none of them."""
