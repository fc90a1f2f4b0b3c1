"""An emulated cluster on one machine: ``mpicomp lab run``.

Each host is a set of namespaces (network, processes, mounts, host name, shared memory), so that MPI sees several
machines: shared memory inside a host, TCP between hosts. The hosts' data interfaces, ``eth0``, are joined by one
process that carries every packet at the rate and with the latency asked for; a second network without limits is the
launcher's alone.

One compiled process carries the packets, and not the kernel's token buckets, for three reasons that were measured.
A bucket lets its burst pass at once: with one that keeps up with 1 Gbit/s, 64 KiB take 0.65 of the time they should.
The kernel's queues are served by threads that compete with ranks that spin; this process runs before all of them.
And no bucket adds latency.

Limits, measured on two cores with one spinning rank a host (100 MB by a ring, 4 hosts unless said otherwise; the
bound is what the links allow): 1 Gbit/s 1.07 to 1.15 of the bound without latency and 1.1 with 1 ms, 2.5 Gbit/s 1.2
to 1.3; two hosts at 5 Gbit/s 1.2; eight hosts at 1 Gbit/s 1.4, for eight ranks do not fit on two cores. The way
through this process alone takes about 20 us in each direction, on top of the latency asked for. Packets are never
lost.
"""
