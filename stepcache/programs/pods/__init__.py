"""Pods: how the processes of one come by the same program, and hand their parts of a batch in."""
