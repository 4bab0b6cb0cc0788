"""Pods: how all processes of one get the same program."""
