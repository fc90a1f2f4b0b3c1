"""An emulated cluster on one machine, ``mpicomp lab run``: each host is a set of namespaces, so that MPI sees several.

One compiled process carries every packet between the hosts' ``eth0``; a second network without limits is the
launcher's. The kernel's token buckets, the alternative, add no latency, let a burst pass at once (with one that keeps
up with 1 Gbit/s, 64 KiB take 0.65 of the time they should), and compete with ranks that spin. Limits: docs/lab.md.
"""
