"""Calls of steps that pass `Variables`: run over the buffers that hold their leaves."""
