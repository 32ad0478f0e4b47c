"""The low-latency decoder: one sequence over buffers of a fixed size, each step the same few operations."""

from fb_core.engine.low_latency import LowLatencyDecoder as LowLatencyDecoder
