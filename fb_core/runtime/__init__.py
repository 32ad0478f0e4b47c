"""The low-latency decoder: one sequence over buffers of a fixed size, each step the same few operations."""

from fb_core.runtime.decoder import LowLatencyDecoder as LowLatencyDecoder
