"""Timings of training steps on the CPU and on GPUs, and of what is around them, beside others."""
