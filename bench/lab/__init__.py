"""An emulated cluster on one machine: ``mpicomp lab run``.

Each host is a set of namespaces (network, processes, mounts, host name, shared memory), so that MPI sees several
machines: shared memory inside a host, TCP between hosts. The hosts' data interfaces, ``eth0``, are joined by one
process that carries every packet at the rate and with the latency asked for; a second network without limits is the
launcher's alone.

One compiled process carries the packets, and not the kernel's token buckets, for three reasons that were measured.
A bucket lets its burst pass at once: with one that keeps up with 1 Gbit/s, 64 KiB take 0.65 of the time they should.
The kernel's queues are served by threads that compete with ranks that spin; this process runs before all of them.
And no bucket adds latency.

Limits are in docs/lab.md.
"""
