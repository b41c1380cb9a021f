"""The native runtime seen from Python: library, devices, streams, memory. Knows no graph."""
