"""What every op stands on: registration, the choice of an implementation, libraries, checks, tuning and timing."""

PACKAGE = __name__.rpartition(".")[0]  # "fb_kernels", or the name of a copy
