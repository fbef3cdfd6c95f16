"""Servers that live exactly as long as somebody uses them.

A job takes a `lease` (an flock, which the kernel releases even on kill -9). The first lease starts
a `keeper`, a process of its own session, which starts the servers, watches them, and stops them
when no lease has been held for a while. Every server runs inside a `replica` process that outlives
nothing: when the keeper dies, however it dies, the replica takes the server and all its children
down.
"""
