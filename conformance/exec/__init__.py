"""Backends in programs of their own: JSON lines on standard input and output, tensors in safetensors files.

PROTOCOL.md says what is exchanged, messages.py is its schema, program.py the suite's end of it.
"""
